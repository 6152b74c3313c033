"""The device tier: entries that clients keep on cards, the orders to evict them, and the answers to the orders.

    Devices.sampled → a pass chooses rows (passes, ranking) → orders to their owners → acknowledgement

Owns: the table of entries of each card, passes, and orders. Imports the forms of the governor's events and effects.
"""
