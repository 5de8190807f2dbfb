"""The report in a real browser without a network: it draws and answers clicks. Skipped where there is no Chromium."""

import html
import json
import re
import shutil
import subprocess

import pytest
from inspect_helpers import TOKENS, WINDOWS, known

from mhar_jax.inspect.figures import Results
from mhar_jax.inspect.probe import probe
from mhar_jax.inspect.report import make_out_dir, view_tokens, write_report
from mhar_jax.inspect.statistics import measure_routing

BROWSER = next((p for name in ("chromium", "google-chrome", "chrome") if (p := shutil.which(name))), None)

# Clicks what a reader clicks, and notes what the page then says.
DRIVER = """
<script>{
const said = [], note = name => said.push([name, document.getElementById("says").textContent]);
const shades = () => [...document.querySelectorAll("#tokens span")].filter(s => s.style.background).length;
window.onerror = (message) => said.push(["error", message]);
const map = () => document.getElementById("map");
const ink = () => { const d = map().getContext("2d").getImageData(0, 0, map().width, map().height).data;
                    let sum = 0; for (let i = 0; i < d.length; i += 4) sum += d[i] * 3 + d[i + 1] * 5 + d[i + 2] * 7;
                    return sum; };
const before = ink(); note("start");
document.querySelectorAll("#tokens span")[3].click(); note("token"); said.push(["redrawn", ink() !== before]);
document.querySelector('[data-head="1"]').click();
document.querySelector('[data-view="difference"]').click(); note("difference");
document.getElementById("tokens").dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"})); note("arrow");
const r = map().getBoundingClientRect();
const at = {clientX: r.left + box.left + 1.5 * box.cell, clientY: r.top + box.top + 3.5 * box.cell};
map().dispatchEvent(new MouseEvent("mousemove", at)); said.push(["tip", document.getElementById("tip").textContent]);
map().dispatchEvent(new MouseEvent("click", at)); note("cell"); said.push(["shaded", shades()]);
document.querySelector('[data-sites="attn"]').click(); said.push(["rows", box.shown.length]);
document.body.insertAdjacentHTML("beforeend", '<pre id="said"></pre>');
document.getElementById("said").textContent = JSON.stringify(said);
}</script>
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_the_page_answers(tmp_path):
    walk = known("mhar").walk
    results = Results("m", "t", measure_routing(walk, WINDOWS), probe(walk, WINDOWS, draws=2), None)
    view = view_tokens(walk, TOKENS[0, 0, :-1], list("abcdefghijk"))
    page = write_report(results, view, make_out_dir(str(tmp_path / "out")))[0]
    driven = tmp_path / "driven.html"
    driven.write_text(page.read_text().replace("</body>", DRIVER + "</body>"))
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            driven.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=170,
    )
    *_, written = re.findall(r'<pre id="said">(.*?)</pre>', done.stdout, re.S)  # the first is in the driver itself
    said = dict(json.loads(html.unescape(written)))
    assert "error" not in said
    assert said["start"].startswith("Shown: average over 66 tokens; mean over heads; depth weight, from 0 (pale)")
    assert said["token"].startswith('Shown: token 3, "d"; mean over heads')
    assert said["redrawn"]
    assert said["difference"].startswith('Shown: token 3, "d", minus the average; head 2')
    assert said["arrow"].startswith('Shown: token 4, "e", minus the average; head 2')
    assert said["tip"].startswith("L2 mlp reads L1 attn\naverage ")
    assert "Tokens shaded by the weight of L2 mlp on L1 attn" in said["cell"]
    assert said["shaded"] == 11
    assert said["rows"] == 3
