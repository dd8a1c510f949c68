"""The page in a real browser, before a real engine: on a desk, on a phone, in the dark, by keyboard."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

import pipeline
from pipeline.server.keys import make_key
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings

OVERRIDES = ("depth.max=4", "constraint=llguidance", "model.delay_ms=2", "server.shutdown_s=1")
EVIL = "<img src=x onerror=document.title='owned'><b>bold</b>"


@pytest.fixture(scope="module")
def base():
    with (
        pipeline.load("fake", *OVERRIDES) as engine,
        serve_in_thread(engine, ServerSettings(shutdown_s=1)) as base,
    ):
        yield base


@pytest.fixture
def page(browser, base):
    browser.get(base + "/")
    until(browser, "!document.getElementById('main').hidden")
    yield browser
    said = [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"]
    asked = browser.execute_script(
        "return performance.getEntriesByType('resource').map(entry => entry.name)"
    )
    browser.get("about:blank")
    assert said == []
    assert all(name.startswith(base) for name in asked), asked


def until(browser, condition, timeout_s=15):
    found = WebDriverWait(browser, timeout_s, 0.05)
    return found.until(lambda b: b.execute_script(f"return {condition}"), condition)


def text(browser, name):
    return browser.find_element(By.ID, name).text


def fill(browser, name, value):
    field = browser.find_element(By.ID, name)
    browser.execute_script("arguments[0].closest('details').open = true", field)
    if field.tag_name != "select":
        field.clear()
    field.send_keys(value)


def send(browser, words):
    count = browser.execute_script("return document.querySelectorAll('.notes').length")
    browser.find_element(By.ID, "words").send_keys(words, Keys.ENTER)
    until(browser, f"document.querySelectorAll('.notes').length === {count + 1}")
    until(browser, "[...document.querySelectorAll('.notes')].at(-1).textContent !== ''")
    return browser.execute_script(
        "return [...document.querySelectorAll('.notes')].at(-1).textContent"
    )


@contextmanager
def screen(browser, width, **media):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    yield
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_graph_lives_when_somebody_chats(page):
    stages = page.find_elements(By.CSS_SELECTOR, ".phase[data-phase=decode] .stage .name")
    assert [one.text for one in stages] == ["draft", "verify", "accept", "detokenize", "commit"]
    assert "drafter=ngram" in text(page, "graph")
    notes = send(page, "hello")
    assert re.match(r"200 tokens in .*: \d+ plain, \d+ accepted, \d+ bonus", notes), notes
    until(page, "document.querySelector('[data-phase=decode]').textContent.includes(' ms')")
    until(page, "document.querySelector('#tiles').textContent.includes('200 so far')")
    until(page, "document.querySelectorAll('.bars')[0].rows.length === 4")
    assert "of 4.0 GB" in text(page, "charts")
    drawn = page.execute_script("return document.querySelectorAll('.uplot canvas').length")
    assert drawn == 3


def test_an_answer_streams_token_by_token_in_its_colours(page):
    page.find_element(By.ID, "words").send_keys("hello", Keys.ENTER)
    count = "document.querySelectorAll('.tokens .t').length"
    until(page, f"{count} > 5")
    assert page.execute_script(f"return {count}") < 200, "it came in one piece"
    until(page, "document.getElementById('stop').hidden")
    colours = {
        kind: page.find_element(By.CSS_SELECTOR, f".tokens .{kind}").value_of_css_property(
            "background-color"
        )
        for kind in ("plain", "accepted", "bonus")
    }
    assert len(set(colours.values())) == 3
    assert "accepted" in text(page, "legend")


def test_a_running_answer_can_be_stopped(page):
    fill(page, "f-max_tokens", "8000")
    page.find_element(By.ID, "words").send_keys("hello", Keys.ENTER)
    seen = "document.querySelectorAll('.tokens .t').length > 5"
    stop = "document.getElementById('stop')"
    until(page, f"{seen} && !{stop}.hidden && !{stop}.click()")  # at once: the answer goes on
    until(page, "document.querySelector('.notes').textContent === 'Stopped.'")
    until(page, "!document.getElementById('send').disabled")
    until(page, "document.querySelector('#tiles').textContent.match(/requests running0/)")


def test_what_a_model_writes_is_text(page):
    fill(page, "f-form", "one of")
    fill(page, "f-source", EVIL)
    notes = send(page, EVIL)
    shown = page.execute_script("return document.querySelector('.tokens').textContent")
    assert shown == EVIL and "constrained" in notes
    assert page.execute_script("return document.querySelectorAll('#talk img, #talk b').length") == 0
    assert page.title != "owned"


def test_a_wrong_request_is_told_in_the_servers_words(page):
    fill(page, "f-form", "a regular")
    fill(page, "f-source", "(")
    assert "guided_regex" in send(page, "x")
    assert len(page.find_elements(By.CSS_SELECTOR, ".notes.fault")) == 1
    page.get_log("browser")  # Chromium logs every 400


def test_the_request_can_be_repeated_as_curl_and_as_python(page):
    for name, value in (
        ("f-seed", "7"),
        ("f-top_k", "3"),
        ("f-temperature", "1.5"),
        ("f-max_tokens", "30"),
    ):
        fill(page, name, value)
    fill(page, "f-system", 'it\'s "quoted" \\ $HOME')
    page.find_element(By.ID, "words").send_keys("say 'x'")
    page.execute_script("document.getElementById('request').open = true")
    curl, python = text(page, "curl"), text(page, "python")
    page.find_element(By.ID, "words").send_keys(Keys.ENTER)
    until(page, "document.querySelector('.notes')?.textContent")
    shown = page.execute_script("return document.querySelector('.tokens').textContent")
    told = subprocess.run(
        [sys.executable, "-c", python], capture_output=True, text=True, timeout=60
    )
    assert told.stdout == shown, told.stderr
    if (
        "curl"
        in subprocess.run(["sh", "-c", "command -v curl"], capture_output=True, text=True).stdout
    ):
        said = subprocess.run(["sh", "-c", curl], capture_output=True, text=True, timeout=60).stdout
        chunks = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == shown


def test_by_keyboard_alone(page):
    seen = []
    for _ in range(40):
        page.switch_to.active_element.send_keys(Keys.TAB)
        here = page.switch_to.active_element
        seen.append(here.get_attribute("id") or here.text.split("\n")[0])
        outline = here.value_of_css_property("outline-style")
        assert outline == "solid", f"the focus cannot be seen on {seen[-1]}"
        if seen[-1] == "words":
            break
    assert "To the playground" in seen[0]
    stages = [name for name in seen if name in ("tokenize", "chunked_prefill", "draft", "spill")]
    assert stages == ["tokenize", "chunked_prefill", "draft", "spill"]
    page.switch_to.active_element.send_keys("hello", Keys.ENTER)
    until(page, "document.querySelector('.notes')?.textContent.includes('200 tokens')")
    assert "complete" in page.execute_script("return document.getElementById('told').textContent")
    page.execute_script("document.querySelector('[data-phase=decode] .stage').focus()")
    page.switch_to.active_element.send_keys(Keys.SPACE)
    assert "Ask the drafter what may come next." in text(page, "detail")
    assert "to verify (decode): proposal" in text(page, "detail")


def test_every_control_has_a_name(page):
    nameless = page.execute_script("""
      document.querySelectorAll('details').forEach(one => { one.open = true; });
      return [...document.querySelectorAll('button, input, select, textarea, a, [tabindex]')]
        .filter(one => !(one.labels?.length || one.textContent.trim() || one.ariaLabel))
        .filter(one => !one.getAttribute('aria-labelledby'))
        .map(one => one.outerHTML)""")
    assert nameless == []


def test_on_a_phone_nothing_is_wider_than_the_screen(page):
    with screen(page, 390):
        send(page, "hello " + "x" * 300)
        page.execute_script(
            "document.querySelectorAll('details').forEach(one => { one.open = true; })"
        )
        page.find_element(By.CSS_SELECTOR, "[data-phase=decode] .stage").click()
        wide = page.execute_script(
            "return document.documentElement.scrollWidth - window.innerWidth"
        )
        small = page.execute_script(
            "return [...document.querySelectorAll('#ask button, .stage')].map(one => one.offsetHeight)"
        )
    assert wide <= 0
    assert min(height for height in small if height) >= 32


def test_it_follows_a_dark_screen_and_one_that_wants_no_motion(page):
    with screen(page, 1280, prefers_color_scheme="dark", prefers_reduced_motion="reduce"):
        style = page.execute_script("""
          const of = (where, name) => getComputedStyle(document.querySelector(where)).getPropertyValue(name);
          return {ink: of('body', 'color'), page: of('body', 'background-color'),
                  card: of('.stage', 'background-color'), motion: of('.fill', 'transition-duration')}""")
    light = {
        name: sum(map(int, re.findall(r"\d+", style[name])[:3])) > 380
        for name in ("ink", "page", "card")
    }
    assert light == {"ink": True, "page": False, "card": False}
    assert style["motion"] == "0s"


def test_the_configuration_says_who_chose_what(page):
    told = page.execute_script("return document.getElementById('config').textContent")
    assert "drafter=ngram" in told and "recipe fake" in told
    rows = page.execute_script("""
      return [...document.querySelectorAll('#config tr.set')]
        .map(row => [...row.cells].map(cell => cell.textContent))""")
    assert ["depth.max", "4", "command line"] in rows


def test_where_keys_are_needed_the_page_asks_for_one(browser, tmp_path):
    secret, digest = make_key()
    (tmp_path / "keys.yaml").write_text(f'alice: {{sha256: "{digest}"}}')
    settings = ServerSettings(shutdown_s=1, keys=str(tmp_path / "keys.yaml"))
    with pipeline.load("fake", *OVERRIDES) as engine, serve_in_thread(engine, settings) as base:
        browser.get(base + "/")
        until(browser, "!document.getElementById('key').hidden")
        assert not browser.find_element(By.ID, "main").is_displayed()
        assert "smollm2" not in browser.page_source and "ngram" not in browser.page_source
        browser.switch_to.active_element.send_keys("wrong", Keys.ENTER)
        until(browser, "document.getElementById('key-fault').textContent.includes('not known')")
        browser.switch_to.active_element.send_keys(secret, Keys.ENTER)
        until(browser, "!document.getElementById('main').hidden")
        assert "200 tokens" in send(browser, "hello")
        shown = browser.execute_script("return document.documentElement.textContent")
        assert secret not in shown and "$HEADRACE_API_KEY" in shown
        assert 'os.environ["HEADRACE_API_KEY"]' in shown
        browser.refresh()
        until(browser, "!document.getElementById('main').hidden")
        browser.execute_script("sessionStorage.clear()")
        browser.get("about:blank")
    browser.get_log("browser")  # Chromium logs every 401


def test_it_says_when_the_server_was_started_again(browser, tmp_path):
    """Two servers one after the other at one address."""
    with serving("fake") as first:
        port = first.rpartition(":")[2]
        browser.get(first + "/")
        until(browser, "!document.getElementById('main').hidden")
    until(browser, "document.getElementById('link').dataset.state === 'lost'")
    with serving("fake", f"server.port={port}", "drafter=none") as second:
        assert second == first
        until(browser, "document.getElementById('link').textContent.includes('started again')")
        until(browser, "!document.getElementById('graph').textContent.includes('drafter=ngram')")
        browser.get("about:blank")
    browser.get_log("browser")  # Chromium logs every refused connection


@contextmanager
def serving(recipe, *overrides):
    """A server in a process of its own; its address."""
    words = ["-m", "pipeline", "serve", recipe, "server.port=0", "server.shutdown_s=1", *overrides]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    try:
        lines = iter(process.stdout.readline, "")
        yield next(line.split()[-1] for line in lines if line.startswith("Headrace serves"))
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()
