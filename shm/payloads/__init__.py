"""What lies in a span: a tree of tensors as bytes, and the record of a prefix.

It may import `shm.ring`, `shm.index` and `tensord.errors`; torch only once a tree holds a tensor. It owns the form of
trees and of prefix records, and the copies of tensors into and out of memory.
"""
