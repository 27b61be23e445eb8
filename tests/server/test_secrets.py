"""What is secret by its name goes into no output, and what only looks like it stays readable."""

from __future__ import annotations

import shlex
import time

import pytest

from mla_diag.server.secrets import REDACTED, command_without_secrets, text_without_secrets, without_secrets

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("HF_TOKEN=hunter2 env python", "HF_TOKEN=... env python"),
        (
            "AWS_SECRET_ACCESS_KEY=hunter2 WANDB_API_KEY=hunter2 python",
            "AWS_SECRET_ACCESS_KEY=... WANDB_API_KEY=... python",
        ),
        ("python --api-key hunter2 --port 5", "python --api-key ... --port 5"),
        ("python --admin-api-key hunter2 --port=5", "python --admin-api-key ... --port=5"),
        ("python '--admin-api-key=hunter2 hunter2'", "python --admin-api-key=..."),
        ("python --ssl-keyfile-password 'hunter2 hunter2' -v", "python --ssl-keyfile-password ... -v"),
        ("docker run -e HF_TOKEN=hunter2 --env=HF_TOKEN=hunter2 i", "docker run -e HF_TOKEN=... --env=HF_TOKEN=... i"),
        ("HTTPS_PROXY=http://me:hunter2@proxy python", "'HTTPS_PROXY=http://me:***@proxy' python"),
        ("bash -c 'cd /x; HF_TOKEN=hunter2 python --port 5'", "bash -c 'cd /x; HF_TOKEN=... python --port 5'"),
        ("""python --extra '{"api_key": "hunter2", "n": 3}'""", """python --extra '{"api_key": ..., "n": 3}'"""),
    ],
)
def test_a_command_is_shown_without_its_secrets(line: str, shown: str):
    assert command_without_secrets(shlex.split(line)) == shown


def test_what_is_no_secret_stays_in_a_command():
    line = (
        "CUDA_VISIBLE_DEVICES=0 TOKENIZERS_PARALLELISM=false python -m sglang.launch_server --tokenizer-path /x "
        "--max-total-tokens 5 --skip-tokenizer-init --ssl-keyfile /k.pem --speculative-num-draft-tokens=4 "
        "--api-key --port 5"
    )
    assert command_without_secrets(line.split()) == line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "error: unrecognized arguments: --admin-api-key hunter2 --foo",
            "error: unrecognized arguments: --admin-api-key ... --foo",
        ),
        ("ServerArgs(api_key='hunter2', max_total_tokens=5)", "ServerArgs(api_key=..., max_total_tokens=5)"),
        ("ERROR: HF_TOKEN=hunter2,hunter2", "ERROR: HF_TOKEN=..."),
        (r'{"password": "hunter2\"hunter2", "n": 3}', '{"password": ..., "n": 3}'),
        ("cannot reach s3://me:hunter2@host/x, retrying", "cannot reach s3://me:***@host/x, retrying"),
        ("KeyError: 'kv_lora_rank'", "KeyError: 'kv_lora_rank'"),
        ("no such key: 'max_new_tokens' in http://host:80/x", "no such key: 'max_new_tokens' in http://host:80/x"),
    ],
)
def test_a_line_of_a_log_is_quoted_without_secrets(text: str, shown: str):
    assert text_without_secrets(text) == shown


def test_an_answer_of_a_server_is_kept_without_secrets():
    answer = {
        "admin_api_key": SECRET,
        "api_key": None,
        "hf_token": SECRET,
        "max_total_num_tokens": 5,
        "model_path": f"s3://me:{SECRET}@host/model",
        "internal_states": [{"loader_config": f'{{"secret_key": "{SECRET}"}}', "note": "started with sk-1"}],
    }
    kept = without_secrets(answer, "sk-1")
    assert SECRET not in str(kept)
    assert "sk-1" not in str(kept)
    assert (kept["api_key"], kept["hf_token"], kept["max_total_num_tokens"]) == (None, REDACTED, 5)
    assert kept["model_path"] == "s3://me:***@host/model"


@pytest.mark.parametrize("piece", ["a", "a-", "://", "--token ", "token: ", '--token "'])
def test_a_long_line_takes_no_longer_than_its_length(piece: str):
    begun = time.monotonic()
    text_without_secrets(piece * (1_000_000 // len(piece)))
    assert time.monotonic() - begun < 10
