"""The page: curves over seeds, tokens in the colour of their credit, and a real browser's view."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from matplotlib.image import imread

from megatron_binac import report, report_page
from megatron_binac.report_charts import bars, line_chart, ticks

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
BROWSERS_OWN = ("google.com", "googleapis.com", "gstatic.com")
"""Where a fresh profile of the browser itself calls, whatever it shows."""


def write_run(run_dir: Path, **settings: Any) -> Path:
    """`write_run` of test_report.py, which is no module that could be imported by name."""
    spec = importlib.util.spec_from_file_location(
        "report_runs", Path(__file__).with_name("test_report.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("report_runs", module)
    spec.loader.exec_module(module)
    return module.write_run(run_dir, **settings)


def tree(advantage: float = 0.5, **own: Any) -> dict[str, Any]:
    revisions = [
        {"text": "4", "reward": 1.0, "advantage": advantage},
        {"text": "5", "reward": 0.0, "advantage": -advantage},
    ]
    attempt = {"text": "5", "reward": 0.0, "advantage": -0.25, "finish": "stop", **own}
    told = {"attempt": 0, "text": "too big", "advantage": 0.125, "revisions": revisions}
    return {"prompt": "2+2", "gold": "4", "attempts": [attempt], "feedbacks": [told]}


def test_the_mean_of_seeds_is_read_off_each_curve() -> None:
    series = {"1": [(0.0, 0.0), (10.0, 1.0)], "2": [(0.0, 0.0), (5.0, 0.25), (20.0, 1.0)]}
    *seeds, mean = report_page.group_lines("r", series, "#000", dots=False)
    assert [line.faint for line in seeds] == [True, True]
    # Common to both is 0..10; the longer curve has points at 0 and 5 there. At 5: 0.5 and 0.25.
    assert list(mean.points) == [(0.0, 0.0), (5.0, 0.375)]
    assert (list(mean.low or []), list(mean.high or [])) == ([0.0, 0.25], [0.0, 0.5])


def test_one_seed_is_a_line_without_a_band() -> None:
    (line,) = report_page.group_lines("r", {"1": [(0.0, 1.0)], "2": []}, "#000", dots=True)
    assert not line.faint
    assert line.low is None


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0.0, 1.0) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(0.0, 400_000.0, 4) == [0, 100_000, 200_000, 300_000, 400_000]
    assert ticks(-0.13, 0.41) == pytest.approx([-0.0, 0.2, 0.4])


def test_a_chart_places_points_in_its_frame() -> None:
    line = report_page.Line(name="a<b", color="#123456", points=[(0.0, 0.0), (10.0, 1.0)])
    text = line_chart("t", [line], x_label="x", unit=True)
    # Left edge 46 to right edge 408, bottom 216 to top 12.
    assert 'points="46.0,216.0 408.0,12.0"' in text
    assert "a&lt;b" in text
    assert line_chart("t", [], x_label="x") == ""


def test_bars_share_one_scale() -> None:
    text = bars("t", [("a", [("play", 1.0), ("lead", 3.0)]), ("b", [("play", 2.0)])], "s")
    assert re.findall(r"width:([\d.]+)%", text) == ["25.00", "75.00", "50.00"]


def test_tokens_have_the_colour_of_their_advantage(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "a", trees=[tree()])
    text = report.write_report([run_dir], None)[1].read_text()
    # The largest credit is 0.5: full strength, 0.62 of the way to the colour's own green and red.
    assert '<span class=tok style="background:#61c3a8">4</span>' in text
    assert '<span class=tok style="background:#e59b61">5</span>' in text
    assert "+0.5" in text
    assert "first 0 of 1 right, after feedback 1 of 2 right" in text


def test_tokens_are_those_of_the_tokenizer_with_their_own_credit(tmp_path: Path) -> None:
    own = {"ids": [1, 2, 3], "token_advantages": [1.0, 0.0, -1.0], "text": "ab"}
    run_dir = write_run(tmp_path / "a", trees=[tree(**own)])
    split = {run_dir: lambda turn: list(turn["text"]) if "ids" in turn else [turn["text"]]}
    text = report.write_report([run_dir], None, split)[1].read_text()
    # Scale 0.5: an advantage of 1 is cut at full strength; the end token has no text and is left.
    assert '<span class=tok style="background:#61c3a8">a</span><span class=tok>b</span>' in text


def test_the_tree_with_most_credits_is_unfolded(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "a", trees=[tree(), tree(advantage=-0.25)])
    text = report.write_report([run_dir], None)[1].read_text()
    opened = re.findall(r'<details class="tree"( open)?>', text)
    assert opened == [" open", ""]


def test_runs_differ_in_what_is_said(tmp_path: Path) -> None:
    dirs = [write_run(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    text = report.write_report(dirs, tmp_path / "out")[-1].read_text()
    assert "<tr><th>what differs</th><th>toy (seed 1)</th><th>toy (seed 2)</th></tr>" in text
    assert "<tr><td>seed</td><td>1</td><td>2</td></tr>" in text
    assert "toy, mean of 2 seeds" in text
    assert "<h2>At equal amounts</h2>" in text


def browse(page: Path, folder: Path, size: str) -> tuple[Path, list[str], list[str]]:
    """A screenshot, what the console said, and the addresses that the page asked for."""
    assert BROWSER is not None
    shot, log = folder / "shot.png", folder / "net.json"
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--no-first-run", f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr",
         f"--log-net-log={log}", f"--window-size={size}", f"--screenshot={shot}", page.as_uri()],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert shot.is_file(), done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    text = log.read_text()
    try:
        events = json.loads(text)["events"]
    except json.JSONDecodeError:  # the browser was faster than its log
        events = json.loads(text.rstrip().rstrip(",") + "]}")["events"]
    urls = {e["params"]["url"] for e in events if e.get("params", {}).get("url")}
    asked = []
    for url in sorted(urls):
        host = urlparse(url).hostname or ""
        if urlparse(url).scheme.startswith("http") and not host.endswith(BROWSERS_OWN):
            asked.append(url)
    return shot, console, asked


needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="needs chromium, chromium-browser or google-chrome on the PATH"
)


@needs_browser
@pytest.mark.slow
def test_a_browser_shows_three_seeds_of_three_recipes_without_a_word(tmp_path: Path) -> None:
    dirs = [
        write_run(tmp_path / f"{recipe}-{seed}", recipe=recipe, seed=seed, trees=[tree(), tree()],
                  gain=0.02 + 0.01 * seed)
        for recipe in ("binac", "grpo", "joint") for seed in (1, 2, 3)
    ]  # fmt: skip
    page = report.write_report(dirs, tmp_path / "out")[-1]
    (tmp_path / "wide").mkdir()
    shot, console, asked = browse(page, tmp_path / "wide", "900,700")
    assert console == []
    assert asked == []
    # Not a blank page: the colours of the three recipes are there, as their bars and curves.
    seen = (imread(shot)[..., :3] * 255).round().astype(int) @ [65536, 256, 1]
    for color in (0x0072B2, 0xD55E00, 0x009E73):
        assert (seen == color).sum() > 50, hex(color)


@needs_browser
@pytest.mark.slow
def test_the_browser_would_have_told(tmp_path: Path) -> None:
    """A page that breaks both rules is caught, so that silence means something."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<link rel="icon" href="data:,"><img src="http://127.0.0.1:9/x.png"><script>nothing()</script>'
    )
    _, console, asked = browse(bad, tmp_path, "300,200")
    assert asked == ["http://127.0.0.1:9/x.png"]
    assert any("nothing is not defined" in line for line in console)
