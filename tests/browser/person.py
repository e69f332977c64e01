"""The chat page as a person sees and uses it, through a browser's driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

WAIT_LIMIT_S = 60.0
"""How long the page may take on a loaded machine."""


class Page:
    """The chat page as a person sees it. Its calls block, so tests make them in a thread, see `seen`."""

    def __init__(self, browser: webdriver.Chrome) -> None:
        self.browser = browser

    def open(self, url: str) -> None:
        """Load the page and wait until it has listed the models, or complained."""
        self.browser.get(url)
        self.wait(lambda: self.texts("#model option") or self.error)

    def reload(self) -> None:
        self.browser.refresh()
        self.wait(lambda: self.texts("#model option") or self.error)

    def find(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """The text of each such element, read in the page: what is out of sight counts."""
        script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
        found: list[str] = self.browser.execute_script(script, selector)
        return found

    def wait(self, condition: Callable[[], Any]) -> None:
        WebDriverWait(self.browser, WAIT_LIMIT_S, poll_frequency=0.02).until(lambda _: condition())

    def wait_for_answer(self, text: str) -> None:
        """Until the newest answer is this."""
        self.wait(lambda: self.texts(".assistant .text")[-1:] == [text])

    def set(self, name: str, value: str) -> None:
        field = self.find(f"#settings [name={name}]")
        field.clear()
        field.send_keys(value, "\t")

    def type(self, *keys: str) -> None:
        self.find("#input").send_keys(*keys)

    @property
    def error(self) -> str:
        return self.find("#error").text

    @property
    def is_running(self) -> bool:
        return self.find("#stop").is_displayed()

    def run(self, script: str) -> Any:
        return self.browser.execute_script(script)

    def troubles(self) -> list[str]:
        """What the browser's console complains of, such as what the page's policy forbade."""
        return [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]
