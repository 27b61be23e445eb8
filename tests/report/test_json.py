"""The JSON report is the documented schema, field for field."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

import mla_diag
from mla_diag.bench import agreement, measure, server
from mla_diag.diagnose import compare as comparison
from mla_diag.diagnose import diagnosis as schema
from mla_diag.report.json import render_json

DOCUMENT = Path(__file__).parents[2] / "docs" / "report-schema.md"


def test_report_is_valid_json_of_the_schema(recordings: Path):
    given = mla_diag.explain(recordings / "base-eager-decode-stack.trace.json.gz")
    text = render_json(given)
    fields = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert list(fields)[:2] == ["schema_version", "tool"]
    assert fields["schema_version"] == schema.SCHEMA_VERSION
    assert fields["tool"]["name"] == "mla-diag"
    assert msgspec.json.decode(text, type=schema.Diagnosis) == given


KINDS = [
    *(schema.Diagnosis, schema.TraceReport, schema.StageReport, schema.Op, schema.KernelUse, schema.Source),
    *(schema.Finding, comparison.Comparison, comparison.StageChange, comparison.OpChange, comparison.Side),
    *(server.ServerBench, server.ServerSide, server.Gain, measure.Measured, measure.LeftOut),
    *(measure.Row, measure.Spread, agreement.Agreement),
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_documented(kind: type[msgspec.Struct]):
    documented = set(re.findall(r"^\| `(\w+)`", DOCUMENT.read_text(), re.MULTILINE))
    assert set(kind.__struct_fields__) <= documented
