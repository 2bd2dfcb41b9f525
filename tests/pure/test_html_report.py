"""The report as one web page: whole, without network, and opened in a browser if there is one."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from graph_passes.report import Report, Span
from tests.pure.test_fusion_report import REGION
from tests.pure.test_headline import REPORT
from tfmem.html_report import page, write_html

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
WHOLE = replace(
    REPORT,
    curve_after=(("resnet50_1/conv1_1/Relu", 1 << 30), ("<script>alert(1)</script>", 7 << 30)),
    curve_before=(("resnet50_1/conv1_1/Relu", 2 << 30), ("</script>", 15 << 30)),
    regions=(REGION,),
    fusion_state="stitched",
    fusion="stitched",
    not_stitched=(("draw", "a stateful random op"),),
    alive_before=(("resnet50_1/conv1_1/Relu:0", 1 << 30),),
    alive_after=(("resnet50_1/conv2_1/Relu:0", 1 << 20),),
    spans=(Span("compute", "a", 0, 5_000), Span("wait", "x:0", 5_000, 9_000), Span("out", "x:0", 0, 9_000)),
    others=(replace(REPORT, graph="resnet50.evaluate", transfers=()),),
)


POINT = """
const picture = document.querySelector("svg.memory"), box = picture.getBoundingClientRect();
const at = {bubbles: true, clientX: box.left + box.width * 0.1, clientY: box.top + 20};
picture.dispatchEvent(new MouseEvent("mousemove", at));
"""


class Tags(HTMLParser):
    """The tags of a page, in order, with what refers elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.refers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.refers += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag not in ("meta", "rect", "line", "path", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()


def test_the_page_is_whole_and_needs_no_network() -> None:
    text = page(WHOLE)
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.refers == []
    assert not re.search(r"(?:url\((?!#)|@import|fetch\(|https?://(?!www\.w3\.org/))", text)
    assert "<script>alert" not in text
    for words in (
        "<h1><code>resnet50.fit</code>: fits 8.0 GiB",
        "<h1><code>resnet50.evaluate</code>",
        "Largest tensors at the peak",
        "copies out",
        "resnet50/conv1/Relu:0",
        "a stateful random op",
    ):
        assert words in text


def test_a_report_without_curves_is_a_page_too() -> None:
    empty = Report("train", "CPU", "none", "unchanged: no budget", 0, 0)
    assert "<code>train</code>: no memory budget; nothing was changed" in page(empty)
    assert "<svg" not in page(empty)


@pytest.mark.skipif(not BROWSER, reason="no Chromium on the path: apt-get install chromium")
def test_a_browser_draws_the_page_and_runs_its_script(tmp_path: Path) -> None:
    file, picture = write_html(WHOLE, tmp_path / "report.html"), tmp_path / "page.png"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}"]
    drawn = [f"--screenshot={picture}", "--window-size=1000,1400", "--dump-dom", file.as_uri()]
    done = subprocess.run([*command, *drawn], capture_output=True, text=True, timeout=250, check=True)
    assert 'data-ready="yes"' in done.stdout  # the script ran to its end
    assert "Uncaught" not in done.stderr
    if not picture.exists():  # some versions do one of the two
        subprocess.run([*command, *drawn[:2], file.as_uri()], capture_output=True, timeout=250, check=True)
    hovered = tmp_path / "hovered.html"
    hovered.write_text(page(WHOLE).replace("</body>", f"<script>{POINT}</script></body>"))
    done = subprocess.run(
        [*command, "--dump-dom", hovered.as_uri()], capture_output=True, text=True, timeout=250, check=True
    )
    assert (
        "without tfmem: 2.0 GiB at resnet50/conv1/Relu\nwith tfmem: 1.0 GiB at resnet50/conv1/Relu</div>" in done.stdout
    )
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">II", data[16:24]) == (1000, 1400)
    assert len(data) > 20_000  # an empty page is a few kilobytes
