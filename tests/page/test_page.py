"""The page in a real browser, by mouse and by keyboard, in light and dark, wide and narrow."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.text import bytes_text
from shardrules.programs.audits.text import count_text
from tests.cli.command import EXAMPLES, GPT, GPT_RULES, shardrules
from tests.house.source import REPOSITORY
from tests.page.browser import axe_faults, launched, opened, overlaps
from tests.programs.examples import mesh_on

pytestmark = pytest.mark.slow

BLOCK = {
    "attention": {"q": {"weight": (256, 256), "bias": (256,)}, "out": {"weight": (256, 256)}},
    "mlp": {"up": {"weight": (256, 1024)}, "down": {"weight": (1024, 256)}},
    "norm": (256,),
}
RULES = sr.RegexShardingRule(
    [
        ("norm|bias", P()),
        ("embed", P(("data", "model"))),
        ("down", P("model", "data")),
        ("adapter", P("data", None, "model")),
        ("head", sr.DimShardingRule("data", 0)),
        ("weight", P("data", "model")),
    ]
)
MESH = sr.mesh_shape("data:4,model:2")


STEPS = (*(1024**power for power in range(5)), *(1000**power for power in range(1, 5)))


def shapes(tree: Any, dtype: Any = jnp.float32) -> Any:
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype), tree, is_leaf=lambda node: isinstance(node, tuple)
    )


def small_plan() -> sr.ShardingPlan:
    tree = {
        "embed": (512, 64),
        "blocks": [BLOCK] * 3,
        "adapter": (8, 3, 6),
        "head": (66, 8),
        "big": (1024, 1024),
        "scale": (),
    }
    return RULES.plan(shapes(tree), MESH)


def forward(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ w["up"]) @ w["down"]


def in_layers(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, w)[0] ** 2)


@functools.cache
def results() -> dict[str, Any]:
    """An audit, an autoplan and a training plan."""
    w, x = shapes({"up": (64, 256), "down": (256, 64)}), shapes((512, 64))
    columns = {"up": P(None, "model"), "down": P(None, "model")}
    audit = sr.audit(forward, w, x, mesh=MESH, in_shardings=(columns, P("data")))
    gradient = jax.grad(lambda w, x: forward(w, x).mean())
    planned = sr.reports.AutoPlanReport.of(sr.autoplan(gradient, w, x, mesh=MESH), frontier=3)
    step = sr.plan_training(in_layers, shapes((4, 64, 64)), optax.sgd(0.1), x, cluster="cpu:4", stages=2)
    return {"audit": audit, "planned": planned, "training": step.report}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything on it."""
    plan = small_plan()
    params = {path.replace("/", "."): leaf for path, leaf in (("embed", shapes((512, 64))),)}
    state = plan.mirror({"mu": params, "count": shapes(())})
    file = tmp_path_factory.mktemp("page") / "small.html"
    file.write_text(sr.report_page(plan, state=state, title="A <small> model", **results()))
    return file


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with 45,000 arrays."""
    expert = {"gate": (2048, 7168), "up": (2048, 7168), "down": (7168, 2048)}
    layer = {"experts": [expert] * 256, "norm": (7168,), "attention": dict.fromkeys("qkvo", (7168, 7168))}
    tree = shapes({"embed": (129280, 7168), "layers": [layer] * 58}, jnp.bfloat16)
    rules = sr.RegexShardingRule([("norm", P()), ("expert", P(("data", "model"))), (".", P("model", "data"))])
    plan = rules.plan(tree, sr.mesh_shape("data:32,model:16"))
    assert len(plan.paths) > 44_500
    file = tmp_path_factory.mktemp("page") / "large.html"
    file.write_text(sr.report_page(plan, title="A large model"))
    return file


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the example, with the state of its optimizer."""
    file = tmp_path_factory.mktemp("page") / "gpt.html"
    rules = ("--rules", GPT_RULES, "--mesh", "data:4,model:2", "--optimizer", "adamw")
    assert shardrules("report", GPT, *rules, "-o", str(file)).returncode == 0
    return file


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a model without modules, in which names are long."""
    tree = {f"a_rather_long_name_of_an_array_{index}": (64 * (index + 1), 64) for index in range(30)} | {
        "large": (8192, 64)
    }
    tree |= {"model/one/two/three": {"x": (64, 64), "y": (64,)}, "z": {"z": {"z": (256, 64), "zz": (64, 64)}}}
    file = tmp_path_factory.mktemp("page") / "flat.html"
    file.write_text(sr.report_page(sr.FSDPShardingRule("data", min_size_mb=0).plan(shapes(tree), MESH)))
    return file


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from launched()


def count(page: Any) -> str:
    return page.inner_text("#match-count").partition(" array")[0]


def search(page: Any, text: str) -> str:
    page.fill("#search", text)
    return count(page)


def rows(page: Any) -> Any:
    return page.locator("#leaves tbody tr")


def texts(page: Any, css: str) -> list[str]:
    return page.locator(css).all_inner_texts()


def focused(page: Any, name: str) -> Any:
    return page.evaluate(f"document.activeElement.getAttribute({name!r})")


def test_numbers_are_rounded_as_tables_round_them(browser: Any) -> None:
    generator = np.random.default_rng(0)
    # Halves, which round to even; both sides of each unit; and any others.
    values = [2**power * quarters // 4 for power in range(45) for quarters in range(1, 60)]
    values += [
        base * step + add for base in (1, 10, 999, 1000, 1023, 1024) for step in STEPS for add in (-52, -51, -1, 0, 1)
    ]
    values += [int(value) for value in 2 ** generator.uniform(0, 52, 5000)]
    values += [-value for value in values]
    numbers = (REPOSITORY / "shardrules" / "page" / "assets" / "numbers.js").read_text()
    page = browser.new_page()
    texts = page.evaluate(f"(values) => {{ {numbers}\n return values.map((n) => [bytes(n), flops(n)]); }}", values)
    expected = [[bytes_text(value), f"{count_text(value)}FLOP"] for value in values]
    assert [pair for pair in zip(texts, expected, strict=True) if pair[0] != pair[1]] == []
    page.close()


def test_the_header_names_the_plan(browser: Any, small: Path) -> None:
    plan = small_plan()
    with opened(browser, small) as page:
        assert page.inner_text("h1") == "A <small> model"
        head = page.inner_text("main")[:400]
        assert str(len(plan.paths) + 2) in head
        assert plan.fingerprint[:8] in head


def test_the_head_counts_the_findings_of_all_sections(browser: Any, tmp_path: Path) -> None:
    def finding(severity: Any, code: str) -> sr.Finding:
        return sr.Finding(severity, code, "it is so")

    plan = sr.SpecTreeShardingRule({"w": P("data", "model")}).plan({"w": shapes((64, 64))}, MESH)
    audit, planned, step = results().values()
    severities = "error", "warning", "warning", "note"
    audit = attrs.evolve(audit, findings=tuple(finding(each, f"audit-{i}") for i, each in enumerate(severities)))
    planned = attrs.evolve(planned, findings=(finding("warning", "planned"), finding("note", "planned")))
    step = attrs.evolve(step, findings=(finding("warning", "training"),))
    file = tmp_path / "page.html"
    file.write_text(sr.report_page(plan, audit=audit, planned=planned, training=step))
    with opened(browser, file) as page:
        assert texts(page, "#summary .badge") == ["1 error", "4 warnings", "2 notes"]
        assert page.locator(".finding").count() == 7
        assert texts(page, "#sections b") == ["4", "2", "1"]
    file.write_text(sr.report_page(plan, planned=attrs.evolve(planned, findings=planned.findings[1:])))
    with opened(browser, file) as page:
        assert texts(page, "#summary .badge") == ["no errors, no warnings", "1 note"]


def test_search_by_words_specs_and_paths(browser: Any, small: Path) -> None:
    total = len(small_plan().paths) + 2
    with opened(browser, small) as page:
        assert count(page) == str(total)
        assert search(page, "attention weight") == f"6 of {total}"
        assert search(page, "P('model', 'data')") == f"3 of {total}"
        assert search(page, '"blocks/1"') == f"6 of {total}"
        assert search(page, "no such thing <b>") == f"0 of {total}"
        assert page.locator("#no-match").is_visible()
        assert search(page, "") == str(total)


def test_every_column_sorts_both_ways(browser: Any, small: Path) -> None:
    with opened(browser, small) as page:
        for key in ("count", "shape", "dtype", "spec", "bytes", "device", "rule", "reason", "path"):
            directions = []
            for _ in range(2):
                page.click(f"#leaves th.c-{key} button")
                directions.append(page.get_attribute(f"#leaves th.c-{key}", "aria-sort"))
                assert page.locator("#leaves th[aria-sort]").count() == 1
            assert sorted(directions) == ["ascending", "descending"]
        page.click("#leaves th.c-bytes button")
        assert texts(page, "#leaves tbody .c-path")[0].startswith("big")


def test_chosen_leaves_show_blocks_and_have_an_address(browser: Any, small: Path) -> None:
    with opened(browser, small) as page:
        search(page, "mlp/up")
        rows(page).first.click()
        assert page.inner_text("#detail h3") == "blocks/0/mlp/up/weight"
        assert rows(page).first.get_attribute("aria-selected") == "true"
        detail = page.inner_text("#detail")
        assert "dim 0: 256 in 4 blocks of 64 over data" in detail
        assert "dim 1: 1,024 in 2 blocks of 512 over model" in detail
        assert "matches 'weight'" in detail
        assert page.locator("#drawing svg .block").count() == 8
        titles = page.eval_on_selector_all("#drawing svg title", "all => all.map(title => title.textContent)")
        assert "[192–255], [512–1,023]: on device 7" in titles
        page.keyboard.press("Escape")
        assert page.locator("#detail").is_hidden()
        page.go_back()
        page.wait_for_selector("#detail:visible")
    with opened(browser, small, fragment="#leaf=blocks%2F2%2Fmlp%2Fdown%2Fweight") as page:
        assert page.inner_text("#detail h3") == "blocks/2/mlp/down/weight"


def test_findings_link_to_their_arrays(browser: Any, small: Path) -> None:
    with opened(browser, small) as page:
        assert page.locator("#findings details[open]").count() == 2
        text = page.inner_text("#findings")
        assert "indivisible" in text
        assert "weakened" in text
        page.click("#findings .finding.error .what")
        assert count(page).startswith("1 of ")
        rows(page).first.click()
        assert "66" in page.inner_text("#detail")
        assert page.locator("#drawing").count() == 0  # it cannot be split


def test_the_table_works_by_keyboard(browser: Any, small: Path) -> None:
    with opened(browser, small) as page:
        page.focus("#search")
        for _ in range(16):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.closest('tbody') !== null"):
                break
        assert focused(page, "aria-rowindex") == "2"
        search_row = texts(page, "#leaves tbody .c-path")
        row_index = next(index for index, text in enumerate(search_row) if "blocks/*" in text)
        for _ in range(row_index):
            page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowRight")
        assert focused(page, "aria-expanded") == "true"
        page.keyboard.press("ArrowRight")
        assert focused(page, "aria-level") == "2"
        page.keyboard.press("Enter")
        assert page.inner_text("#detail h3").startswith("blocks/0/")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        assert focused(page, "aria-expanded") == "false"
        page.keyboard.press("End")
        assert focused(page, "aria-rowindex") == page.get_attribute("#leaves", "aria-rowcount")
        page.keyboard.press("Home")
        assert focused(page, "aria-rowindex") == "2"
        page.keyboard.press("Escape")
        assert page.locator("#detail").is_hidden()


def test_arrays_are_grouped_by_layer(browser: Any, small: Path) -> None:
    with opened(browser, small) as page:
        page.click("#view label:nth-of-type(2)")
        assert texts(page, "#leaves tbody tr.heading .c-path")[:3] == ["blocks/0", "blocks/1", "blocks/2"]
        page.click("#leaves th.c-device button")
        assert page.locator("#leaves tr.heading").count() == 0
        assert page.get_attribute("#leaves", "aria-rowcount") == str(len(small_plan().paths) + 3)


def test_themes_switch_and_persist(browser: Any, small: Path) -> None:
    with opened(browser, small) as page:
        theme = "document.documentElement.dataset.theme"
        assert page.evaluate(theme) == "light"
        page.click("#theme label:nth-of-type(3)")
        assert page.evaluate(theme) == "dark"
        page.reload()
        assert page.evaluate(theme) == "dark"
        page.click("#theme label:nth-of-type(1)")
        assert page.evaluate(theme) == "light"
        page.emulate_media(color_scheme="dark")
        page.wait_for_selector("html[data-theme=dark]")


def test_the_map_zooms_and_links_to_arrays(browser: Any, small: Path) -> None:
    with opened(browser, small) as page:
        page.locator("#treemap").scroll_into_view_if_needed()
        colours = page.evaluate(
            """() => { const c = document.querySelector('.map canvas');
            const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
            const seen = new Set();
            for (let i = 0; i < d.length; i += 4004) seen.add(d[i] + ',' + d[i + 1] + ',' + d[i + 2]);
            return seen.size }"""
        )
        assert colours > 2
        page.locator(".map-labels button", has_text="blocks").focus()
        assert page.locator(".map-tip").is_visible()
        page.keyboard.press("Enter")
        page.wait_for_selector(".crumbs > :last-child:text-is('blocks')")
        assert page.evaluate("document.activeElement.closest('.map-labels') !== null")
        page.keyboard.press("Escape")
        page.wait_for_selector(".crumbs > :only-child")
        box = page.locator(".map canvas").bounding_box()
        page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 0.5 * box["height"])
        assert "big" in page.inner_text(".map-tip")
        page.mouse.click(box["x"] + 0.2 * box["width"], box["y"] + 0.5 * box["height"])
        assert page.inner_text("#detail h3") == "big"


@pytest.mark.parametrize("width", [360, 760, 1240, 1920])
@pytest.mark.parametrize("name", ["small", "large", "gpt", "flat"])
def test_labels_of_the_map_do_not_cover_each_other(
    name: str, width: int, browser: Any, request: pytest.FixtureRequest
) -> None:
    with opened(browser, request.getfixturevalue(name), width=width) as page:
        page.locator("#treemap").scroll_into_view_if_needed()
        for _ in range(3):
            page.wait_for_timeout(50)
            count, bad = overlaps(page, ".map-labels button, .map-names span")
            assert count > 0
            assert bad == []
            frame = page.locator(".map").bounding_box()
            for box in map(page.locator(".map-labels button, .map-names span").nth, range(min(count, 5))):
                inner = box.bounding_box()
                assert inner["x"] >= frame["x"] - 1
                assert inner["x"] + inner["width"] <= frame["x"] + frame["width"] + 1
            if not page.locator(".map-labels button").count():
                break
            page.locator(".map-labels button").first.focus()
            page.keyboard.press("Enter")


@pytest.mark.parametrize("path", ["adapter", "embed", "blocks/0/mlp/up/weight"])
def test_words_of_a_drawing_do_not_cover_each_other(path: str, browser: Any, small: Path) -> None:
    with opened(browser, small, fragment=f"#leaf={path.replace('/', '%2F')}") as page:
        count, bad = overlaps(page, "#drawing svg text")
        assert count > 4
        assert bad == []
        fills = page.eval_on_selector_all("#drawing .block", "all => all.map((node) => getComputedStyle(node).fill)")
        assert len(fills) == len(set(fills)) == 8


def test_the_rules_and_the_command_are_shown(browser: Any, gpt: Path, small: Path) -> None:
    with opened(browser, gpt) as page:
        assert page.inner_text("#origin .command").startswith(
            f"shardrules report {GPT} --rules {GPT_RULES} --mesh data:4"
        )
        rules = page.inner_text("#origin .scroll")
        assert "RegexShardingRule(" in rules
        assert "('embedding', P(('data', 'model')))," in rules
        assert page.locator("#sections a[href='#origin']").is_visible()
    with opened(browser, small) as page:
        assert page.locator("#origin .command").count() == 0
        assert "('embed', P(('data', 'model')))," in page.inner_text("#origin")


def test_audit_and_autoplan_are_shown(browser: Any, small: Path) -> None:
    with opened(browser, small) as page:
        audit = page.inner_text("#audit")
        assert "all-gather" in audit
        assert "test_page.py" in audit
        assert "parameters" in audit
        assert page.locator("#audit .bar").count() > 0
        drawn = page.locator("#audit .timeline svg")
        titles = drawn.locator("title").all_text_contents()
        assert any("all-gather" in title for title in titles)
        assert any(title.startswith("wait for") for title in titles)
        assert {"compute", "links"} <= set(drawn.locator("text").all_text_contents())
        assert {"kernel", "collective", "waiting"} <= set(
            page.locator("#audit .timeline + .keys li").all_text_contents()
        )
        planned = page.inner_text("#autoplan")
        assert re.search(r"w/\S+\[\d\]", planned)
        assert page.locator("#autoplan svg circle").count() == 3
        training = page.inner_text("#training")
        assert "optimizer state" in training
        assert page.locator("#training .badge", has_text="chosen").count() == 1
        schedule = page.locator("#training [aria-label='Drawing of the schedule'] svg")
        assert {"stage 0", "stage 1"} <= set(schedule.locator("text").all_text_contents())
        titles = schedule.locator("title").all_text_contents()
        assert {"stage 1: backward, microbatch 1, chunk 0", "stage 0: forward, microbatch 0, chunk 0"} <= set(titles)


def test_long_schedules_are_named_and_not_drawn(browser: Any, tmp_path: Path) -> None:
    step = attrs.evolve(results()["training"], microbatches=1024, chunks=1)
    file = tmp_path / "page.html"
    file.write_text(sr.report_page(small_plan(), training=step))
    with opened(browser, file) as page:
        assert "gpipe: 2 stages, 1024 microbatches; bubble 0.1%" in page.inner_text("#training")
        assert page.locator("#training [aria-label='Drawing of the schedule']").count() == 0


def test_the_timeline_of_a_step_for_gpus_opens(browser: Any, tmp_path: Path) -> None:
    """The step of the example GPT on eight H100s, from the command to the drawing."""
    mesh_on("cuda:h100:8", "data:8")
    step, words = f"{EXAMPLES}/train_gpt.py:training", ("--mesh", "data:4,model:2", "--rules", GPT_RULES)
    options = ("--params", "state/model", "--batch", "data", "--target", "cuda:h100:8")
    files = ("--timeline", "trace.json", "-o", "audit.json")
    process = shardrules("audit", step, *words, *options, *files, cwd=tmp_path, env={"JAX_PLATFORMS": "cpu"})
    assert process.returncode == 0, process.stderr
    report = sr.reports.AuditReport.from_json((tmp_path / "audit.json").read_text())
    assert (tmp_path / "trace.json").read_text() == report.timeline.to_json()
    assert report.timeline.seconds == pytest.approx(report.step_time())
    assert shardrules("report", GPT, *words, "--audit", "audit.json", "-o", "page.html", cwd=tmp_path).returncode == 0
    with opened(browser, tmp_path / "page.html") as page:
        drawn = page.locator("#audit .timeline svg")
        titles = drawn.locator("title").all_text_contents()
        names = {title.partition(":")[0] for title in titles}
        collectives = [event.name for event in report.timeline.events if event.resource == "links"]
        assert {name for name in collectives if name.startswith(("all-gather", "reduce-scatter"))} <= names
        assert any("train_gpt.py:" in title for title in titles)
        box = drawn.bounding_box()
        assert box is not None
        assert min(box["width"], box["height"]) > 50
        assert "train_gpt.py" in page.inner_text("#audit")
        assert axe_faults(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["small", "large"])
def test_axe_finds_no_fault(name: str, scheme: str, browser: Any, request: pytest.FixtureRequest) -> None:
    file = request.getfixturevalue(name)
    for width in (360, 1440):
        with opened(browser, file, scheme=scheme, width=width) as page:
            page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true })")
            assert axe_faults(page) == []
            rows(page).nth(1).click()
            page.wait_for_timeout(200)
            assert axe_faults(page) == []
            wide = page.evaluate("[document.documentElement.scrollWidth, document.body.scrollWidth]")
            assert max(wide) <= width


def test_45000_arrays_draw_only_visible_rows(browser: Any, large: Path) -> None:
    with opened(browser, large) as page:
        assert search(page, "experts/17 up").startswith("638 of")
        assert rows(page).count() < 80
        page.fill("#search", "")
        page.click("#view label:nth-of-type(2)")
        rows(page).nth(2).click()
        page.keyboard.press("End")
        last = page.get_attribute("#leaves", "aria-rowcount")
        assert int(last) > 44_500
        page.wait_for_selector(f":focus[aria-rowindex='{last}']")
        assert rows(page).count() < 80


EVIL = '</script><img src=x onerror="window.hurt = 1"><b>/*JS*/'


def test_plans_cannot_inject_markup(browser: Any, tmp_path: Path) -> None:
    tree = {EVIL: shapes((8, 8)), "w": {EVIL: shapes((6, 6))}}
    plan = sr.RegexShardingRule([("w", P("data")), (".", P("model"))]).plan(tree, MESH)
    file = tmp_path / "evil.html"
    file.write_text(sr.report_page(plan, title=EVIL))
    with opened(browser, file) as page:
        assert page.inner_text("h1") == EVIL
        rows(page).first.click()
        assert page.evaluate("window.hurt") is None
        assert page.locator("img").count() == 0


@pytest.mark.parametrize(
    "spec",
    [P("data", None), P("nowhere"), P("data", "data"), P(("model", "data"))],
    ids=["rank", "axis", "twice", "divide"],
)
def test_unsound_plans_have_a_page(spec: P, browser: Any, tmp_path: Path) -> None:
    plan = sr.SpecTreeShardingRule({"b": spec, "w": spec}).plan({"b": shapes((4,)), "w": shapes((4, 3))}, MESH)
    file = tmp_path / "wrong.html"
    file.write_text(sr.report_page(plan))
    with opened(browser, file) as page:
        assert page.locator("#findings .finding.error").count() > 0
        rows(page).first.click()
        assert page.inner_text("#detail h3") == "b"


@pytest.mark.parametrize("tree", [{}, {"w": shapes((3,))}], ids=["nothing", "no mesh"])
def test_empty_plans_have_a_page(tree: Any, browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "bare.html"
    file.write_text(sr.report_page(sr.ReplicateShardingRule().plan(tree)))
    with opened(browser, file) as page:
        assert count(page) == str(len(tree))
        for part in ("audit", "autoplan", "training"):
            assert page.locator(f"#{part}").count() == 0
        assert axe_faults(page) == []


def test_without_scripts_it_says_so(browser: Any, small: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(small.as_uri())
    assert "needs JavaScript" in page.inner_text("main")
    context.close()
