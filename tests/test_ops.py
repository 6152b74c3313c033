"""The files for Prometheus and Grafana in ops/, against the exposition of a running daemon.

Expressions are read by promql-parser. promtool checks the rules too, where it is installed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tensord.daemon.web import metrics

from .client.ctl import documents
from .daemon_process import PATIENCE_S, Daemon
from .http_reader import asked

ROOT: Final = Path(__file__).parents[1]
OPS: Final = ROOT / "ops"
OF_PROMETHEUS: Final = frozenset({"up"})
"""Metrics that Prometheus itself adds."""
OF_A_SCRAPE: Final = frozenset({"instance", "job"})
"""Labels that Prometheus itself adds."""
SUFFIXES: Final = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}
TOTAL: Final = {"counter": "_total", "info": "_info"}
DASHBOARD: Final = json.loads((OPS / "grafana.json").read_text())
RULES: Final = [rule for group in yaml.safe_load((OPS / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """Every expression, with the title of its panel or rule. Grafana's variables have values in it."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
    for rule in RULES:
        yield rule["alert"], rule["expr"]


def selectors(expression: str) -> list[Any]:
    """The vector selectors of an expression."""
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(expression), lambda node: found.append(node))
    return [node for node in found if isinstance(node, promql_parser.VectorSelector)]


def labels_of_families() -> dict[str, set[str]]:
    """By metric: its labels."""
    families = metrics.families(documents.status())
    return {family.name + TOTAL.get(family.type, ""): set(vars(family).get("_labelnames", ())) for family in families}


@pytest.fixture
def exposed(tmp_path: Path) -> set[str]:
    """The names of all series that a running daemon may expose."""
    with Daemon(remote_url=f"dir://{tmp_path}") as daemon:
        response, text = asked(daemon.start().socket.with_name("metrics.sock"), "/metrics")
    assert response.status == 200, text
    return {
        family.name + suffix
        for family in text_string_to_metric_families(text)
        for suffix in SUFFIXES.get(family.type, ("",))
    }


def test_every_expression_of_the_dashboard_and_the_alerts_asks_for_metrics_that_a_daemon_has(exposed: set[str]) -> None:
    wanted = {(title, each.name) for title, expression in expressions() for each in selectors(expression)}
    assert len(wanted) > 40, "the expressions were not found"
    assert {(title, name) for title, name in wanted if name not in exposed | OF_PROMETHEUS} == set()


def test_every_selector_matches_labels_that_a_metric_has() -> None:
    labels = labels_of_families()
    for title, expression in expressions():
        for each in selectors(expression):
            family = re.sub(r"_bucket$", "", each.name)
            known = labels.get(family, set()) | OF_A_SCRAPE
            assert {matcher.name for matcher in each.matchers.matchers} <= known, f"{title}: {each.name}"


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len(set(names)) > 10
    for rule in RULES:
        assert rule["labels"]["severity"] in ("info", "warning", "critical"), rule["alert"]
        assert rule["annotations"]["summary"] and rule["annotations"]["description"], rule["alert"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_prometheus_accepts_the_rules_and_the_configuration() -> None:
    for words in (["rules", "alerts.yml"], ["config", "prometheus.yml"]):
        ran = subprocess.run(
            ["promtool", "check", *words], cwd=OPS, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
