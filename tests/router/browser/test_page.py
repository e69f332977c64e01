"""The chat page's files: behind the gate, under a policy, complete, and with nothing from elsewhere."""

from __future__ import annotations

import base64
import re
from pathlib import Path

from tests.fakes.router_stack import in_loop, stack

WEB = Path(__file__).parents[3] / "router" / "web"
REFERENCE = re.compile(r"""(?:src|href|from)\s*=?\s*["']([^"']+)["']""")


@in_loop
async def test_every_file_is_served_under_the_policy(model_dir: Path) -> None:
    async with stack(model_dir) as made:
        for file in WEB.iterdir():
            path = "/" if file.name == "index.html" else f"/web/{file.name}"
            answer = await made.http.get(path)
            assert answer.content == file.read_bytes()
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "*" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = await made.http.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await made.http.get("/web/..%2fconfig.py")).status_code == 404


def test_the_files_name_each_other_and_no_other_site() -> None:
    for file in WEB.iterdir():
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"(?:https?:)?//[a-z0-9-]+\.", text.replace("http://www.w3.org/2000/svg", ""))
        for name in REFERENCE.findall(text):
            assert name.startswith(("web/", "./")), (file.name, name)
            assert (WEB / name.rpartition("/")[2]).is_file()
        if file.suffix == ".html":
            assert not re.search(r"\son[a-z]+=|style=|<script(?![^>]*\bsrc=)", text)
        if file.suffix == ".js":
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)


@in_loop
async def test_the_page_is_behind_the_key_and_a_person_is_asked_for_it(model_dir: Path) -> None:
    async with stack(model_dir, api_key="k") as made:
        refused = await made.http.get("/", headers={"accept": "text/html"})
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic")
        assert (await made.http.get("/web/chat.js")).status_code == 401
        basic = {"authorization": "Basic " + base64.b64encode(b"me:k").decode()}
        assert (await made.http.get("/", headers=basic)).status_code == 200


@in_loop
async def test_it_can_be_left_out(model_dir: Path) -> None:
    async with stack(model_dir, chat_page=False) as made:
        assert (await made.http.get("/")).status_code == 404
        assert (await made.http.get("/web/chat.js")).status_code == 404
