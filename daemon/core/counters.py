"""The counters are in daemon/reports/counters."""

from ..reports.counters import StoreCounters as StoreCounters
