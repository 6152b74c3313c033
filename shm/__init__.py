"""The memory that the daemon and its clients share: segments, the index, lanes and the form of payloads.

    payloads → index, lanes → ring

It may import only `tensord.errors`, and each package only those to its right. It owns every format that lies in shared
memory, and no decision about what lies there.
"""
