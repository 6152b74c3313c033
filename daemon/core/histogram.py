"""The histograms are in daemon/reports/histogram."""

from ..reports.histogram import Departures as Departures
from ..reports.histogram import Histogram as Histogram
