"""The JSON report is the documented schema, field for field."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import msgspec
import pytest

import mla_diag
from mla_diag.bench import agreement, kernel_record, measure, rows, strategies
from mla_diag.bench import server as server_bench
from mla_diag.diagnose import compare as comparison
from mla_diag.diagnose import diagnosis as schema
from mla_diag.diagnose import gap
from mla_diag.report import fix_account as account
from mla_diag.report.json import render_json
from mla_diag.server import exposure
from mla_diag.server.copy_cost import CopyCost

DOCUMENT = Path(__file__).parents[2] / "docs" / "report-schema.md"


def test_report_is_valid_json_of_the_schema(recordings: Path):
    given = mla_diag.explain(recordings / "base-eager-decode-stack.trace.json.gz")
    text = render_json(given)
    fields = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert list(fields)[:2] == ["schema_version", "tool"]
    assert fields["schema_version"] == schema.SCHEMA_VERSION
    assert fields["tool"]["name"] == "mla-diag"
    assert msgspec.json.decode(text, type=schema.Diagnosis) == given


@pytest.mark.parametrize("later", [("traces", "coordinates"), ("gap", "copy_by_flags_ms"), ("floor",), ("gap",)])
def test_a_report_written_before_a_field_was_added_is_read(recordings: Path, later: tuple[str, ...]):
    """New fields do not change the version of the schema, so `compare` has to take the reports that lack them."""
    given = mla_diag.explain(recordings / "native-graph-decode.trace.json.gz")
    step = gap.Gap(7.0, measured=True, wall_ms=7.2, gap_ms=6.0, copy_ms=0.0, trace=0, copy_by_flags_ms=66.8)
    fields = json.loads(render_json(msgspec.structs.replace(given, gap=step)))
    holder = fields
    for name in later[:-1]:
        holder = holder[name]
    for each in holder if isinstance(holder, list) else [holder]:
        del each[later[-1]]
    read = msgspec.json.decode(json.dumps(fields), type=schema.Diagnosis)
    assert [stage.ops for stage in read.stages] == [stage.ops for stage in given.stages]


# The tables of the page, by the heading or the words right above each.
TABLES = {
    "## The report": schema.Diagnosis,
    "## traces[]": schema.TraceReport,
    "## stages[]": schema.StageReport,
    "## ops[]": schema.Op,
    "## kernels[]": schema.KernelUse,
    "## findings[]": schema.Finding,
    "## source": schema.Source,
    "## floor": gap.Floor,
    "## gap": gap.Gap,
    "## The comparison": comparison.Comparison,
    "## The comparison: stages": comparison.StageChange,
    "## The comparison: ops": comparison.OpChange,
    "## The comparison: before": comparison.Side,
    "## The exposure": exposure.Exposure,
    "## The exposure: stages": exposure.StageExposure,
    "## The exposure: copy": CopyCost,
    "## The fix": account.FixAccount,
    "## The fix: sites": account.SiteEntry,
    "## The fix: outlooks": account.OutlookEntry,
    "## The fix: measured": account.Measurement,
    "## The fix: strategies": strategies.Measured,
    "## The fix: changes": account.ChangeEntry,
    "## The fix: verdicts": account.VerdictEntry,
    "## The kernel benchmark": kernel_record.Record,
    "## The kernel benchmark: rows": rows.Row,
    "## The benchmark of a server": server_bench.ServerBench,
    "## The benchmark of a server: repeatability": agreement.Agreement,
    "## The benchmark of a server: before": server_bench.ServerSide,
    "## The benchmark of a server: rows": measure.Measured,
    "## The benchmark of a server: left_out": measure.LeftOut,
    "## The benchmark of a server: row": measure.Row,
    "## The benchmark of a server: figures": measure.Spread,
    "## The benchmark of a server: gains": server_bench.Gain,
}


def fields_of(kind: type) -> tuple[msgspec.structs.FieldInfo | dataclasses.Field[object], ...]:
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else msgspec.structs.fields(kind)


def documented_fields() -> dict[str, list[str]]:
    """The fields of each table of the page."""
    found: dict[str, list[str]] = {}
    heading = table = ""
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("## "):
            heading = table = line
        elif line.endswith(":") and not line.endswith("and these:") and not line.startswith("|"):
            # By the first field that it names, else by its last word: "Each of `rows`:", "Each of the three figures:".
            named = re.findall(r"`(\w+)`", line) or re.findall(r"(\w+):$", line)
            table = f"{heading}: {named[0]}"
        elif field := re.match(r"\| `(\w+)` \|", line):
            found.setdefault(table, []).append(field[1])
    return found


def test_every_table_is_of_a_type_and_every_type_has_its_table():
    assert set(documented_fields()) == set(TABLES)


@pytest.mark.parametrize("table", TABLES)
def test_every_field_is_documented_and_none_is_made_up(table: str):
    fields = {field.name for field in fields_of(TABLES[table])}
    # Said once, above.
    common = {"schema_version", "tool"} - set(documented_fields()[table])
    assert set(documented_fields()[table]) == fields - common
