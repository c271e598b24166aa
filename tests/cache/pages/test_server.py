"""`vllm serve` over coded pages, asked by OpenAI's own client over loopback: streams, many at once, gone, restarted."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from cache.pages.test_in_vllm import CODED
from kvlab.cache.files.recipe import CalibrationFiles, write_recipe_file

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytestmark = [pytest.mark.nightly, pytest.mark.engine]
PATIENCE = 240  # seconds that a start may take
PROMPTS = [list(range(10, 60)), list(range(100, 190, 2)), list(range(10, 45)) + list(range(200, 220)), [7, 8, 9]]
TOKENS = 24
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"  # as `chat_template.jinja` beside a model
)


@pytest.fixture(scope="module")
def recipe(tiny_calibration, tmp_path_factory) -> Path:
    files = CalibrationFiles(sigma=tiny_calibration["sigma"], components=tiny_calibration["components"])
    return write_recipe_file(tmp_path_factory.mktemp("server") / "coded.json", CODED, calibration=files)


@contextmanager
def server(model: Path, recipe: Path, log: Path) -> Iterator[str]:
    """The address of a server that is ready; it is ended as a person would end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "KVLAB_"))}
    own = {
        "KVLAB_PAGES": str(recipe),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    settings = ["--model", str(model), "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"]
    settings += [
        "--max-model-len",
        "224",
        "--num-gpu-blocks-override",
        "24",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *settings]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=clean | own) as process:
        address = f"http://127.0.0.1:{port}"
        try:
            wait_for(lambda: ready(address), process, log)
            yield address
        finally:
            process.terminate()
            process.wait(60)


def wait_for(found, process, log: Path) -> None:
    """Until something is so; what the server said where it ends, or takes too long."""
    end = time.monotonic() + PATIENCE
    while not found():
        assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
        time.sleep(0.5)


def ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.HTTPError:
        return False


def answers(address: str) -> list[str]:
    """One after the other, all at once, and as streams: each must be the same answer."""
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")

    def said(ids: list[int]) -> str:
        asked = {"max_tokens": TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}
        return client.completions.create(model="tiny", prompt=ids, **asked).choices[0].text

    def streamed(ids: list[int]) -> str:
        return "".join(part.choices[0].text for part in stream(client, ids, TOKENS))

    alone = [said(ids) for ids in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(said, PROMPTS)) == alone == list(pool.map(streamed, PROMPTS))
    return alone


def stream(client, ids: list[int], tokens: int):
    asked = {"max_tokens": tokens, "temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}
    return client.completions.create(model="tiny", prompt=ids, **asked)


def gone(address: str) -> bool:
    """Whether no request runs and no page is held, by the server's own metrics."""
    metrics = httpx.get(f"{address}/metrics").text
    found = re.findall(r"^vllm:(?:num_requests_running|kv_cache_usage_perc)\{[^}]*\} (\S+)$", metrics, re.MULTILINE)
    return len(found) == 2 and not any(map(float, found))


def chat_of(client, asked: dict) -> str:
    """The answer to a chat, which has to be that to the chat as the template writes it."""
    plain = client.completions.create(model="tiny", prompt="a tensor\n", **asked).choices[0].text
    chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a tensor"}], **asked)
    assert chat.choices[0].message.content == plain
    return plain


def test_a_server_answers_alike_in_every_way_gives_pages_back_and_survives_a_restart(tiny_model, recipe, tmp_path):
    first, model = tmp_path / "first.log", shutil.copytree(tiny_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with server(model, recipe, first) as address:
        before = answers(address)
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        assert chat_of(client, {"max_tokens": TOKENS, "temperature": 0})
        running = stream(client, PROMPTS[0], 150)
        next(iter(running))
        assert not gone(address)
        running.close()
        end = time.monotonic() + 30
        while not gone(address):
            assert time.monotonic() < end, "a request that was cancelled still holds pages"
            time.sleep(0.2)
        status = httpx.post(f"{address}/collective_rpc", json={"method": "kvlab_status"}).json()["results"][0]
    with server(model, recipe, tmp_path / "second.log") as address:
        assert answers(address) == before
        again = httpx.post(f"{address}/collective_rpc", json={"method": "kvlab_status"}).json()["results"][0]
    assert len(set(before)) > 1 and status["recipe_id"] == again["recipe_id"] == CODED.recipe_id
    assert status["pages"]["bytes_per_token"] < status["pages"]["plain_bytes_per_token"] / 4
    assert again["pages"] == status["pages"] and again["steps"] > 0
