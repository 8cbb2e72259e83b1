"""The live view: the page with controls, in an `anywidget` whose script comes along with it; nothing is fetched.

The page is written in Python alone. The script sends what was clicked, typed or dragged, and puts the new page in
place, with focus and scrolling kept. Until a kernel answers it shows nothing, so that saved notebooks keep the static page.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..errors import ExactnessError, InputError
from .page import Hand, page

if TYPE_CHECKING:
    from .explore import Explorer

VIEW = "application/vnd.jupyter.widget-view+json"
UNFOLD = 400  # tokens that a click on a folded stretch opens, the last ones first
SCRIPT = """
function render({ model, el }) {
  let alive = false, scene = null, begun = null, left = null;
  const root = () => el.querySelector(".dhx");
  const send = (what, value = "") => { root()?.setAttribute("aria-busy", "true"); model.send({ do: what, value }); };
  const draw = () => {
    if (!alive) return;
    const key = el.contains(document.activeElement) ? document.activeElement.dataset.k : null;
    const scrolled = el.querySelector(".dhx-text")?.scrollTop ?? 0;
    const hidden = model.get("key");
    el.innerHTML = `<style>[data-dhx="${hidden}"], .jp-OutputArea-child:has(> .jp-OutputArea-output [data-dhx="${hidden}"]) { display: none !important }</style>` + model.get("html");
    const text = el.querySelector(".dhx-text"), chosen = text.querySelector(".c");
    if (text.dataset.scene !== scene && chosen) text.scrollTop = chosen.offsetTop - 0.7 * text.clientHeight;
    else text.scrollTop = scrolled;
    scene = text.dataset.scene;
    if (key) {
      const again = el.querySelector(`[data-k="${CSS.escape(key)}"]`);
      if (again) { rove(again); again.focus({ preventScroll: true }); }
    }
  };
  const rove = (item) => {
    const group = item.closest("[data-roving]");
    if (!group) return;
    group.querySelectorAll('[tabindex="0"]').forEach((x) => x.setAttribute("tabindex", "-1"));
    item.setAttribute("tabindex", "0");
  };
  const act = (item) => {
    const what = item.dataset.do;
    send(what, what.startsWith("entry-") ? el.querySelector('[data-k="entry"]').value : item.dataset.value ?? item.value);
  };
  // JupyterLab's own keys (arrows, Enter, letters) are looked up from the focused element on, before its parents
  el.addEventListener("focusin", (e) => {
    e.target.setAttribute("data-lm-suppress-shortcuts", "true");
    if (e.target.dataset.i !== undefined) el.querySelector("[data-say]").textContent = e.target.title || "hardly read";
  });
  el.addEventListener("click", (e) => { const item = e.target.closest("button[data-do]"); if (item) act(item); });
  el.addEventListener("change", (e) => { if (e.target.matches("select[data-do], input[data-do]")) act(e.target); });
  el.addEventListener("pointerdown", (e) => { begun = e.target.closest("[data-i]")?.dataset.i ?? null; });
  el.addEventListener("pointerup", (e) => {
    const ended = e.target.closest("[data-i]")?.dataset.i;
    if (begun !== null && ended !== undefined) begun === ended ? send("token", ended) : send("range", `${begun}:${ended}`);
    begun = null;
  });
  el.addEventListener("keydown", (e) => {
    const item = e.target, group = item.closest("[data-roving]");
    if (e.key === "Enter" && item.dataset.k === "entry") return send("entry-off", item.value);
    if (!group) return;
    if (e.key === "Escape") return send("drop");
    if (item.dataset.i !== undefined && (e.key === "Enter" || e.key === " ")) { e.preventDefault(); return send("token", item.dataset.i); }
    const wide = Number(group.dataset.roving), step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -wide, ArrowDown: wide }[e.key];
    const items = [...group.querySelectorAll("[data-k]")];
    const to = e.key === "Home" ? 0 : e.key === "End" ? items.length - 1 : items.indexOf(item) + (step ?? 0);
    if ((step === undefined && e.key !== "Home" && e.key !== "End") || !items[to]) return;
    e.preventDefault();
    rove(items[to]);
    items[to].focus();
  });
  const told = (m) => {
    if (m.alive && !alive) { alive = true; draw(); }
    if (m.done) root()?.removeAttribute("aria-busy");
  };
  model.on("change:html", draw);
  model.on("msg:custom", told);
  model.send({ do: "hello", value: "" });
  return () => { model.off("change:html", draw); model.off("msg:custom", told); };
}
export default { render };
"""


def installed() -> bool:
    """Whether ipywidgets and anywidget can be had."""
    return all(find_spec(name) is not None for name in ("ipywidgets", "anywidget"))


def make(explorer: Explorer) -> Any:
    """The live view of an explorer.

    Raises:
        InputError: where ipywidgets or anywidget are not installed.
    """
    if not installed():
        raise InputError("the live explorer needs ipywidgets and anywidget: pip install ipywidgets anywidget; without them an explorer shows itself as plain HTML")
    import anywidget
    import traitlets

    class Live(anywidget.AnyWidget):
        """An explorer's page with controls. `handle` takes what the script sends."""

        _esm = SCRIPT
        html = traitlets.Unicode("").tag(sync=True)
        key = traitlets.Unicode("").tag(sync=True)

        def __init__(self):
            super().__init__(key=uuid.uuid4().hex)
            self.desk = Desk(explorer)
            self.saved = None  # the static page below, brought up to date with every change
            self.on_msg(lambda widget, content, buffers: self.handle(content))
            self.draw()

        def draw(self) -> None:
            self.html = self.desk.page()
            if self.saved is not None:
                self.saved.update(bundle(explorer, self.key), raw=True)

        def handle(self, content: dict) -> None:
            """One message: `{"do": what, "value": of it}`."""
            if content.get("do") == "hello":
                self.send({"alive": True})
                return
            before = explorer.state
            self.desk.do(str(content.get("do")), str(content.get("value", "")))
            if explorer.state == before:  # a change draws by itself
                self.html = self.desk.page()
            self.send({"done": True})

        def view_data(self) -> dict[str, Any]:
            """What a frontend needs to show it."""
            return {VIEW: {"version_major": 2, "version_minor": 0, "model_id": self.model_id}}

    return Live()


def bundle(explorer: Explorer, key: str = "") -> dict[str, str]:
    """The static page and a line of text."""
    return {"text/plain": repr(explorer), "text/html": f"<div data-dhx='{key}'>{explorer._repr_html_()}</div>"}


def show(explorer: Explorer) -> None:
    """Display the static page, then the live view where it can be had."""
    from IPython.display import display

    if not installed():
        display(bundle(explorer), raw=True)
        return
    live = explorer.widget()
    live.saved = display(bundle(explorer, live.key), raw=True, display_id=True)
    display({"text/html": "<!-- the live view of the page above -->", **live.view_data()}, raw=True)


class Desk(Hand):
    """The hand that works a live view: what its controls do to the explorer."""

    def __init__(self, explorer: Explorer):
        super().__init__()
        self.explorer = explorer
        self._at = explorer.state.transcript, explorer.state.event
        self._does: dict[str, Callable[[str], object]] = {
            "transcript": lambda value: explorer.pick(value), "event": lambda value: explorer.pick(event=int(value)), "colour": explorer.colour_by, "reset": lambda _: explorer.reset(),
            "head": self._toggle, "family": self._toggle, "span": self._span, "readers": self._by, "token": self._token, "range": self._range, "drop": lambda _: None, "unfold": self._unfold,
            "entry-off": self._typed(explorer.off), "entry-on": self._typed(explorer.on), "entry-colour": self._typed(explorer.colour_by), "entry-block": self._typed(self._by)}

    def page(self) -> str:
        """The page with controls."""
        if (now := (self.explorer.state.transcript, self.explorer.state.event)) != self._at:
            self._at, self.picked, self.unfolded = now, None, frozenset()
        return page(self.explorer, self)

    def do(self, what: str, value: str) -> None:
        """Do what a control says; what cannot be done leaves one sentence and changes nothing."""
        self.error, self.entry, self.picked, picked = "", "", None, self.picked
        try:
            if what == "token" and picked is not None:
                self._range(f"{picked}:{value}")
            else:
                self._does[what](value)
        except (InputError, ExactnessError) as error:
            self.error = str(error)

    def _typed(self, doing: Callable[[str], object]) -> Callable[[str], None]:
        """The same with what was typed, which stays to be mended where it cannot be done."""

        def do(value: str) -> None:
            try:
                self.explorer.bench.heads(value)
            except InputError:
                self.entry = value
                raise
            doing(value)

        return do

    def _toggle(self, value: str) -> None:
        heads = self.explorer.bench.heads(value)
        (self.explorer.on if heads <= self.explorer.state.off else self.explorer.off)(heads)

    def _by(self, value: str) -> None:
        self.explorer.bench.heads(value)
        self.readers = value
        if self.explorer.state.block is not None:
            self.explorer.block(self.explorer.state.block, value)

    def _span(self, value: str) -> None:
        if not value:
            self.explorer.unblock()
        elif value in self.explorer.spans:
            self.explorer.block(value, self.readers)

    def _token(self, value: str) -> None:
        self.picked = int(value)

    def _range(self, value: str) -> None:
        first, last = sorted(int(i) for i in value.split(":"))
        offsets = self.explorer.decision.reading.encoded.offsets
        start, end = int(offsets[first, 0]), int(offsets[last, 1])
        if end == 0:
            raise InputError("this token stands for no character of the text, so no span can hold it; choose others")
        self.explorer.block((start, end), self.readers)

    def _unfold(self, value: str) -> None:
        start, end = (int(i) for i in value.split(":"))
        self.unfolded |= frozenset(range(max(start, end - UNFOLD), end))
