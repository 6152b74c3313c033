"""The device tier: entries that clients keep on cards, passes that choose which must leave, and orders to owners.

It imports the governor's forms, gauges (tiers), what is going to be needed (workflows), and the form of a device's free
memory (reservations). It owns the entries and owners of each card, their orders, and what was offloaded.
"""
