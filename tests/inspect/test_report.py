"""The report: complete, self-contained, legible at 9, 25 and 73 sources, and one sentence for every mistake."""

import base64
import dataclasses
import json
import re

import numpy as np
import pytest
from inspect_helpers import TOKENS, WINDOWS, known
from matplotlib.figure import Figure

from mhar_jax.inspect import drawing
from mhar_jax.inspect.__main__ import arguments_parser, main
from mhar_jax.inspect.ablation import Ablation
from mhar_jax.inspect.figures import Results, pictures
from mhar_jax.inspect.maps import Panel, draw_maps, save
from mhar_jax.inspect.probe import probe
from mhar_jax.inspect.report import as_dict, make_out_dir, view_tokens, write_report
from mhar_jax.inspect.statistics import Routing, measure_routing
from mhar_jax.routing_map import RoutingMap, RoutingPictures, picture_of

HF = "tests/fixtures/hf"


def routing_of(layers: int, heads: int) -> Routing:
    """Random weights of a replacement form."""
    rng, sites = np.random.default_rng(0), 2 * layers + 1
    weight = np.full((sites, sites, heads), np.nan)
    for i in range(sites):
        w = rng.exponential(size=(i + 1, heads)) ** 2
        weight[i, : i + 1] = w / w.sum(0)
    names = [f"L{i // 2 + 1} {'mlp' if i % 2 else 'attn'}" for i in range(2 * layers)]
    attention = np.array([n.endswith("attn") for n in names] + [False])
    return Routing(
        sites=[*names, "final"],
        columns=["embed", *names],
        attention_sites=attention,
        mlp_sites=np.array([n.endswith("mlp") for n in names] + [False]),
        counts=np.arange(1, sites + 1),
        weight=weight,
        weight_sd=weight / 2,
        entropy=np.nansum(-weight * np.log(weight), 1),
        gate=None,
        added=None,
        loss=1.5,
        tokens=4096,
    )


def ablation_of(r: Routing) -> Ablation:
    """Random changes, of the right shapes."""
    rng, (sites, n, heads) = np.random.default_rng(1), r.weight.shape
    pair = lambda *shape: np.stack([rng.standard_normal(shape) * 0.1, np.full(shape, 0.01)], -1)
    source = pair(sites, n)
    source[~np.isfinite(r.head_mean)] = np.nan
    return Ablation(1.5, 2048, 16, source, pair(sites, heads), pair(sites, heads), pair(sites), pair(sites))


@pytest.fixture(scope="module")
def results():
    k = known("delta_block")
    routing = measure_routing(k.walk, WINDOWS)
    return k, Results("a model", "a text", routing, probe(k.walk, WINDOWS, draws=2, matched_sources=3), None)


def test_the_maps_are_token_averages_of_the_float64_weights(results):
    k, found = results
    r = found.routing
    assert r.tokens == 66
    assert r.columns == ["null", "embed", "block 1"]
    for site, oracle in enumerate(k.weights):
        count = len(oracle)
        assert r.counts[site] == count
        np.testing.assert_allclose(r.weight[site, :count], oracle.mean((1, 2)), rtol=1e-5)
        np.testing.assert_allclose(r.weight_sd[site, :count], oracle.std((1, 2)), rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(r.entropy[site], -(oracle * np.log(oracle)).sum(0).mean((0, 1)), rtol=1e-5)
        np.testing.assert_allclose(r.mass("newest")[site], oracle[-1].mean((0, 1)), rtol=1e-5)
        np.testing.assert_allclose(r.mass("embedding")[site], oracle[1].mean((0, 1)), rtol=1e-5)
        np.testing.assert_allclose(r.mass("null")[site], oracle[0].mean((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(r.gate, k.params["routing"]["gate"], rtol=1e-6)
    np.testing.assert_allclose(np.nansum(r.deviation, -1), 0, atol=1e-12)
    # What a site adds, over the stream, at the first site: the stream is the embedding.
    embedding, weights = k.sources[0][1], k.weights[0]
    null = k.params["routing"]["null_source"][0]
    heads = [slice(0, 16), slice(16, 32)]
    mix = np.concatenate(
        [
            weights[0, ..., h, None] * null[p] + weights[1, ..., h, None] * embedding[..., p]
            for h, p in enumerate(heads)
        ],
        -1,
    )
    ratio = abs(r.gate[0]) * np.linalg.norm(mix) / np.linalg.norm(embedding)
    assert r.added[0] == pytest.approx(ratio, rel=1e-4)


def test_the_report_needs_no_network_and_holds_every_number(results, tmp_path):
    k, found = results
    texts = ["</script>", "<b>", "\n", "&", *["x"] * 7]
    view = view_tokens(k.walk, TOKENS[0, 0, :-1], texts)
    files = write_report(found, view, make_out_dir(str(tmp_path / "a" / "report")))
    assert files[0].name == "report.html"
    page = files[0].read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:|//)|url\(|@import|fetch\(|XMLHttp|<link""", page)
    assert page.count("</script>") == 2  # the data and the program: a token cannot end either
    assert "$" not in re.sub(r"<script.*", "", page, flags=re.S)  # every placeholder of the template is filled
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S).group(1))
    assert data["tokens"] == texts
    packed = np.frombuffer(base64.b64decode(data["weights"]), np.uint8).reshape(11, -1) / 255
    expected = np.concatenate([np.moveaxis(w[:, 0], 1, 0).reshape(11, -1) for w in k.weights], 1)
    np.testing.assert_allclose(packed, expected, atol=0.5 / 255 + 1e-6)
    numbers = json.loads((tmp_path / "a/report/report.json").read_text())
    assert numbers == as_dict(found)
    np.testing.assert_allclose(numbers["routing"]["weight"][0][1], k.weights[0][1].mean((0, 1)), rtol=1e-5)
    assert json.loads((tmp_path / "a/report/probe.json").read_text()) == found.probe.as_dict()
    for picture in ("routing", "heads", "deviation", "profile", "kinds", "gates", "probe"):
        assert (tmp_path / f"a/report/{picture}.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / f"a/report/{picture}.svg").read_text().startswith("<?xml")


def test_every_picture_says_its_sample_and_applies(results):
    r = routing_of(4, 2)
    _, small = results
    drawn = list(pictures(Results("a model", "the text", r, _probe_like(small, r), ablation_of(r))))
    assert [p.name for p in drawn] == [
        *("routing", "heads", "deviation", "profile", "kinds", "probe"),
        *("ablated_sources", "mass_and_loss", "ablated_heads_and_sites"),
    ]
    for picture in drawn:
        words = " ".join(text.get_text() for text in picture.figure.texts).replace("\n", " ")
        assert re.search(r"[\d,]+ tokens", words), picture.name
        assert "the text" in words, picture.name


def test_pictures_of_a_model_that_has_learned_nothing(results):
    """Equal weights, no change in any loss, and one sequence that says nothing about the noise."""
    r = routing_of(3, 2)
    r = dataclasses.replace(r, weight=np.where(np.isfinite(r.weight), 1 / r.counts[:, None, None], np.nan))
    a = ablation_of(r)
    nothing = {name: value * [0, np.nan] for name, value in vars(a).items() if isinstance(value, np.ndarray)}
    p = _probe_like(results[1], r)
    p = dataclasses.replace(p, disagreement={k: 0 * v for k, v in p.disagreement.items()}, deviation=0 * p.deviation)
    drawn = list(pictures(Results("m", "t", r, p, dataclasses.replace(a, sequences=1, **nothing))))
    for picture in drawn:
        picture.figure.draw_without_rendering()
    words = " ".join(text.get_text() for text in drawn[-3].figure.texts).replace("\n", " ")
    assert "One sequence: nothing is known of the noise." in words


def _probe_like(results: Results, r: Routing):
    """The probe of another model, stretched to the sites of this one."""
    p, sites = results.probe, len(r.sites)
    stretch = lambda x, axis: np.take(x, np.arange(sites) % x.shape[axis], axis)
    return dataclasses.replace(
        p,
        counts=r.counts,
        cosine=stretch(p.cosine, 0),
        deviation=stretch(p.deviation, 1),
        disagreement={k: stretch(v, 1) for k, v in p.disagreement.items()},
        matched={k: stretch(v, 1) for k, v in p.matched.items()},
    )


@pytest.mark.parametrize(("layers", "heads"), [(4, 4), (12, 4), (36, 8)])
def test_maps_are_legible(layers, heads):
    r = routing_of(layers, heads)
    sites = len(r.sites)
    options = {"title": "t", "caption": "c " * 60, "label": "weight", "limit": 1.0}
    first = draw_maps([Panel("", r.head_mean, r.sites)], r.columns, **options)
    assert _labels(first) == [(sites, sites)]  # every row and column of the first picture has its name
    many = draw_maps([Panel(f"head {h}", r.weight[:, :, h], r.sites) for h in range(heads)], r.columns, **options)
    assert len(many.axes) == heads + 1
    for figure in (first, many):
        for axes in figure.axes[:-1]:
            points = axes.get_position().height * figure.get_figheight() * 72 / sites
            shown = [t for t in axes.get_yticklabels() if t.get_text()]
            if not shown:
                continue
            step = np.diff(axes.get_yticks())[0]
            assert shown[0].get_fontsize() >= 4.2
            assert step * points >= shown[0].get_fontsize()  # labels do not overlap
        boxes = [text.get_window_extent() for text in figure.texts]
        width, height = figure.bbox.width, figure.bbox.height
        assert all(b.x0 >= 0 and b.x1 <= width and b.y0 >= 0 and b.y1 <= height for b in boxes)


def _labels(figure: Figure) -> list[tuple[int, int]]:
    return [
        (
            len([t for t in axes.get_yticklabels() if t.get_text()]),
            len([t for t in axes.get_xticklabels() if t.get_text()]),
        )
        for axes in figure.axes[:-1]
    ]


def test_the_same_figure_is_the_same_file(tmp_path):
    r = routing_of(2, 1)
    for name in ("a", "b"):
        figure = draw_maps([Panel("", r.head_mean, r.sites)], r.columns, title="t", caption="c", label="w", limit=1.0)
        save(figure, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_training_pictures_are_drawn_aside_and_the_last_one_stays(tmp_path):
    config = known("mhar").walk.config
    weights = routing_of(3, 2).weight
    pictures_ = RoutingPictures(config, tmp_path / "routing.png")
    for entropy in (0.9, 0.5, 0.1):
        pictures_.submit(RoutingMap(weights, entropy, 0.2, 512))
    pictures_.finish()
    assert [f.name for f in tmp_path.iterdir()] == ["routing.png"]
    again = RoutingPictures(config, tmp_path / "again.png")
    again.submit(RoutingMap(weights, 0.1, 0.2, 512))
    again.finish()
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "routing.png").read_bytes()


@pytest.fixture
def refused(monkeypatch):
    """This process cannot draw; what it is asked to is noted."""
    asked = []

    def refuse(*args, **kwargs):
        asked.append(kwargs["title"])
        raise AssertionError("drawn in the process that trains")

    monkeypatch.setattr(drawing, "draw_maps", refuse)
    return asked


def test_training_pictures_are_drawn_by_another_process(tmp_path, refused):
    """Drawing holds Python's lock: in this process, even in a thread, it would slow the steps of the training down."""
    config = known("mhar").walk.config
    with RoutingPictures(config, tmp_path / "routing.png") as pictures_:
        pictures_.submit(RoutingMap(routing_of(3, 2).weight, 0.5, 0.2, 512))
    assert (tmp_path / "routing.png").stat().st_size > 1000
    assert not refused


def test_a_picture_is_drawn_here_when_the_other_process_is_gone(tmp_path, refused):
    config = known("mhar").walk.config
    map_ = RoutingMap(routing_of(3, 2).weight, 0.5, 0.2, 512)
    mine = drawing.Drawer()
    mine.draw(picture_of(config, map_, tmp_path / "routing.png"))
    mine._process.kill()
    mine._process.wait()
    with pytest.raises(AssertionError, match="drawn in the process that trains"):
        mine.draw(picture_of(config, map_, tmp_path / "again.png"))
    mine.draw(picture_of(config, map_, tmp_path / "again.png"))  # by a new process
    mine.close()
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "routing.png").read_bytes()
    assert len(refused) == 1


def test_a_training_picture_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "routing.png").mkdir()
    pictures_ = RoutingPictures(known("mhar").walk.config, tmp_path / "routing.png")
    pictures_.submit(RoutingMap(routing_of(3, 2).weight, 0.5, 0.2, 512))
    with pytest.raises(ValueError, match=r"the routing map cannot be written to .*routing\.png"):
        pictures_.finish()


@pytest.mark.exhaustive
def test_the_command_on_a_delta_block_checkpoint(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged.\n\nThat a single man.")
    arguments = [f"{HF}/tiny-delta-block-llama", "--data", str(text), "--tokenizer", "bytes", "--out"]
    arguments += [str(tmp_path / "out"), "--seq-len=16", "--batch-size=2", "--draws=2", "--ablation-tokens=0"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert f"57 tokens of {text}; 16 sites, up to 5 sources" in said
    assert (tmp_path / "out" / "gates.png").is_file()
    routing = json.loads((tmp_path / "out" / "report.json").read_text())["routing"]
    assert routing["sources"] == ["null", "embed", "block 1", "block 2", "block 3"]
    assert sum(row[0] for row in routing["weight"][-1]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/checkpoint"], "no/such/checkpoint"),
        ([f"{HF}/tiny-llama31", "--tokenizer=bytes"], "model.variant=additive has no depth routing"),
        ([f"{HF}/tiny-delta-block-llama", "--tokenizer=bytes"], "name a text with --data"),
        ([f"{HF}/tiny-delta-block-llama", "--tokenizer=bytes", "--data=EMPTY"], "holds no document"),
        ([f"{HF}/tiny-delta-block-llama", "--tokenizer=bytes", "--data=SHORT"], "is empty: it holds 1 tokens"),
        ([f"{HF}/tiny-delta-block-llama", "--tokenizer=bytes", "--data=nothing.txt"], "there is no file"),
        ([f"{HF}/tiny-mhar-qwen3", "--tokenizer=bytes", "--data=SHORT"], "vocabulary"),
        ([f"{HF}/tiny-delta-block-llama", "--tokenizer=bytes", "--data=SHORT", "--seq-len=99999999"], "context"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("I")
    places = {"EMPTY": str(tmp_path / "empty.txt"), "SHORT": str(tmp_path / "short.txt")}
    for name, place in places.items():
        arguments = [a.replace(name, place) for a in arguments]
    assert main([*arguments, f"--out={tmp_path / 'out'}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert not (tmp_path / "out").exists()


def test_one_random_query_has_no_spread(capsys):
    with pytest.raises(SystemExit) as stop:
        arguments_parser().parse_args(["run", "--draws", "1"])
    assert stop.value.code == 2
    assert "must be at least 2, for a spread, got 1" in capsys.readouterr().err
