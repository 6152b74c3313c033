"""From gauges to modes: thresholds and hysteresis, baselines, queueing floors, and the steps of agents.

    reading of a gauge → less its baseline → mode of its tier (`modes`, `tiers`) → subscribers

Owns: the last reading and mode of each gauge. Imports the forms of the governor's events, and no loop or clock.
"""
