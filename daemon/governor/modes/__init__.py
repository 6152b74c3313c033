"""From readings to modes: a reading of a gauge, less its baseline, leads by thresholds and hysteresis to the mode.

It imports the governor's forms, and no other room. It owns the last reading and mode of each gauge, and
the subscribers to changes.
"""
