"""A cast of the pool is seen however it is spelled; a cast of anything else is not taken for one."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from mla_diag.fix.flow import PoolFlow, functions_returning_pool, pool_flow
from mla_diag.fix.source import Source


def flow_of(body: str, before: str = "") -> PoolFlow:
    text = f"{before}\ndef forward(self, q, k_rope, layer, rows, batch):\n{textwrap.indent(body, '    ')}\n"
    source = Source.parse(Path("backend.py"), text.encode())
    functions = source.outer_functions()
    return pool_flow(functions[-1], source.parents, functions_returning_pool(functions, source.parents))


CASTS = {
    "chained": "x = self.pool.get_key_buffer(0).to(q.dtype)",
    "over lines": "x = (\n    self.pool\n    .get_key_buffer(0)\n    .to(\n        q.dtype\n    )\n)",
    "through a local": "kv = self.pool.get_key_buffer(0)\nx = kv.to(q.dtype)",
    "through two locals": "a = self.pool.get_key_buffer(0)\nb = a\nx = b.to(q.dtype)",
    "through a view": "x = self.pool.get_key_buffer(0).view(-1, 1, 576).to(q.dtype)",
    "through slices": "kv = self.pool.get_key_buffer(0)\nx = kv[:, :, :512].to(q.dtype)",
    "through an ellipsis": "x = self.pool.get_key_buffer(0)[..., :512].to(q.dtype)",
    "through a view function": "x = paged_view(self.pool.get_key_buffer(0), 64).to(q.dtype)",
    "by keyword": "x = self.pool.get_key_buffer(0).to(dtype=q.dtype)",
    "as a function": "x = torch.Tensor.to(self.pool.get_key_buffer(0), q.dtype)",
    "by name of the type": "x = self.pool.get_key_buffer(0).bfloat16()",
    "like the query": "x = self.pool.get_key_buffer(0).type_as(q)",
    "of one branch": "if rows:\n    kv = self.pool.get_key_buffer(0)\nelse:\n    kv = q\nx = kv.to(q.dtype)",
    "of a conditional": "x = (batch.dcp_kv_buffer if rows else q).to(q.dtype)",
    "of the walrus": "x = (kv := self.pool.get_key_buffer(0)).to(q.dtype)",
    "of a tuple": "kv, other = self.pool.get_key_buffer(0), q\nx = kv.to(q.dtype)",
    "in a closure": "kv = self.pool.get_key_buffer(0)\ndef inner():\n    return kv.to(q.dtype)\nreturn inner()",
    "in a loop, late": "kv = q\nfor _ in rows:\n    x = kv.to(q.dtype)\n    kv = self.pool.get_key_buffer(0)",
    "of the DCP buffer": "x = batch.attn_dcp_metadata.dcp_kv_buffer.to(q.dtype)",
    "in a with": "with rows:\n    x = self.pool.get_key_buffer(0).to(q.dtype)",
    "in a try": "try:\n    kv = self.pool.get_key_buffer(0)\nexcept KeyError:\n    kv = q\nx = kv.to(q.dtype)",
}


@pytest.mark.parametrize("body", CASTS.values(), ids=CASTS.keys())
def test_cast_of_the_pool_is_found(body: str) -> None:
    assert len(flow_of(body).casts) == 1


def test_cast_of_what_another_function_returns_is_found() -> None:
    latent = "def latent(self, layer):\n    return self.pool.get_key_buffer(layer)[:, :, :512]\n"
    assert len(flow_of("x = self.latent(0).to(q.dtype)", latent).casts) == 1


OTHERS = {
    "new tokens": "x = k_rope.view(-1, 1, 64).to(q.dtype)",
    "referenced rows": "x = self.pool.get_key_buffer(0)[rows].to(q.dtype)",
    "selected rows": "x = self.pool.get_key_buffer(0).index_select(0, rows).to(q.dtype)",
    "one row": "x = self.pool.get_key_buffer(0)[0].to(q.dtype)",
    "a name before it became the pool": "x = k_rope.to(q.dtype)\nk_rope = self.pool.get_key_buffer(0)",
    "a name after it was the pool": "kv = self.pool.get_key_buffer(0)\nkv = q\nx = kv.to(q.dtype)",
    "the pool's dtype": "x = q.to(self.pool.get_key_buffer(0).dtype)",
    "attention's output": "x = wrapper.run(q, q, self.pool.get_key_buffer(0), q).to(q.dtype)",
    "of a branch that returns": "if rows:\n    kv = self.pool.get_key_buffer(0)\n    return\nkv.to(q.dtype)",
    "a parameter of a closure": "kv = self.pool.get_key_buffer(0)\ndef inner(kv):\n    return kv.to(q.dtype)",
    "the other of a tuple": "kv, other = self.pool.get_key_buffer(0), q\nx = other.to(q.dtype)",
}


@pytest.mark.parametrize("body", OTHERS.values(), ids=OTHERS.keys())
def test_cast_of_something_else_is_no_site(body: str) -> None:
    assert not flow_of(body).casts


def test_who_is_given_the_pool() -> None:
    flow = flow_of(
        "kv = self.pool.get_key_buffer(0).to(q.dtype)\nwrapper.run(q, q, kv[:, :, :512], kv[:, :, 512:])\nkv.shape"
    )
    assert [call.func.attr.value for call in flow.consumers] == ["run"]  # type: ignore[union-attr]
    assert not any(flow.consumers.values())
    assert not flow.escapes


def test_pool_that_is_cast_on_one_way_only_reaches_its_consumer_uncast() -> None:
    flow = flow_of("kv = self.pool.get_key_buffer(0)\nif rows:\n    kv = kv.to(q.dtype)\nattend(kv)")
    assert list(flow.consumers.values()) == [True]


ESCAPES = {
    "returned": "return self.pool.get_key_buffer(0).to(q.dtype)",
    "stored": "self.kv = self.pool.get_key_buffer(0).to(q.dtype)",
    "in a list": "x = [self.pool.get_key_buffer(0).to(q.dtype)]",
    "its address": "x = self.pool.get_key_buffer(0).to(q.dtype).data_ptr()",
}


@pytest.mark.parametrize("body", ESCAPES.values(), ids=ESCAPES.keys())
def test_pool_that_leaves_otherwise_is_an_escape(body: str) -> None:
    flow = flow_of(body)
    assert len(flow.casts) == 1
    assert len(flow.escapes) == 1
