// What the user does with mouse, fingers and keys: each is something that the page can do.

function listen(page) {
  const canvas = element("canvas"), search = element("search");
  new ResizeObserver(() => {
    page.arrange();
    page.redraw();
  }).observe(canvas.parentElement);
  addEventListener("hashchange", ({ newURL }) => {
    const { hash } = new URL(newURL);
    page.sliders?.show(hash);
    page.view.hash = hash;
    page.repaint();
  });
  page.paper = new Paper(page);
  addEventListener("beforeprint", () => page.paper.fill());
  addEventListener("afterprint", () => page.paper.clear());
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.ctrlKey || event.metaKey) page.view.zoom(Math.exp(event.deltaY * 0.002), page.painter.timeAt(event.offsetX));
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) page.view.pan((event.deltaX || event.deltaY) / page.painter.plot);
    else if (page.rows.total > page.painter.height - AXIS) page.scrollBy(event.deltaY);
    else page.view.zoom(Math.exp(event.deltaY * 0.002), page.painter.timeAt(event.offsetX));
    page.redraw();
  }, { passive: false });
  let pressed = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !event.isPrimary) return; // another button has the browser's menu
    canvas.setPointerCapture(event.pointerId);
    pressed = { x: event.offsetX, y: event.offsetY, moved: false };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!event.isPrimary) return;
    if (!(event.buttons & 1)) pressed = null;
    if (pressed) {
      const dx = event.offsetX - pressed.x, dy = event.offsetY - pressed.y;
      if (pressed.moved || Math.abs(dx) + Math.abs(dy) > 3) {
        pressed = { x: event.offsetX, y: event.offsetY, moved: true };
        page.view.pan(-dx / page.painter.plot);
        page.scrollBy(-dy);
        page.redraw();
      }
    }
    page.point(event.offsetX, event.offsetY);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (event.button !== 0 || !event.isPrimary) return;
    const clicked = pressed && !pressed.moved;
    pressed = null;
    if (clicked) page.click(event.offsetX, event.offsetY);
  });
  canvas.addEventListener("pointercancel", () => (pressed = null));
  canvas.addEventListener("pointerleave", () => page.point(-1, -1));
  canvas.addEventListener("dblclick", (event) => {
    page.view.zoom(0.4, page.painter.timeAt(event.offsetX));
    page.redraw();
  });
  document.addEventListener("keydown", (event) => press(page, event));
  search.addEventListener("input", () => {
    page.view.query = search.value;
    page.repaint();
  });
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") page.next(event.shiftKey ? -1 : 1);
    else if (event.key === "Escape") canvas.focus();
    else return;
    event.preventDefault();
  });
  for (const name of Object.keys(page.view.shows)) element(`show-${name}`).onclick = () => page.toggle(name);
  element("critical").onclick = () => page.toggleCritical();
  element("theme").onclick = () => page.toggleTheme();
  element("whole").onclick = () => page.whole();
  element("help").onclick = () => element("keys").showModal();
}

function press(page, event) {
  if (event.ctrlKey || event.metaKey || event.altKey || element("keys").open) return;
  if (["INPUT", "SELECT"].includes(event.target.tagName) || (event.target.tagName === "BUTTON" && event.key === "Enter")) return;
  const { view } = page, height = page.painter.height - AXIS;
  const keys = {
    ArrowLeft: () => (event.shiftKey && view.chosen ? page.neighbour(-1) : view.pan(-0.15)),
    ArrowRight: () => (event.shiftKey && view.chosen ? page.neighbour(1) : view.pan(0.15)),
    ArrowUp: () => page.scrollBy(-40),
    ArrowDown: () => page.scrollBy(40),
    PageUp: () => page.scrollBy(-height),
    PageDown: () => page.scrollBy(height),
    a: () => view.pan(-0.15),
    d: () => view.pan(0.15),
    w: () => view.zoom(0.7),
    s: () => view.zoom(1 / 0.7),
    "+": () => view.zoom(0.7),
    "=": () => view.zoom(0.7),
    "-": () => view.zoom(1 / 0.7),
    Home: () => page.whole(),
    0: () => page.whole(),
    "/": () => element("search").focus(),
    n: () => page.next(1),
    N: () => page.next(-1),
    c: () => page.toggleCritical(),
    b: () => page.toggle("causes"),
    m: () => page.toggle("memory"),
    k: () => page.toggle("components"),
    e: () => page.toggle("messages"),
    r: () => page.toggle("collectives"),
    g: () => page.toggle("groups"),
    o: () => page.header.timelines.length > 1 && page.toggle("own"),
    f: () => page.foldAll(),
    F: () => view.chosen && page.fold(page.chosenEntry.ranks[page.chosenEntry.rank[view.chosen[1]]]),
    t: () => page.toggleTheme(),
    "?": () => element("keys").showModal(),
    "[": () => view.chosen && page.goTo(lastWait(page.chosenEntry, view.chosen[1])),
    "]": () => view.chosen && page.goTo(heldUp(page.chosenEntry, view.chosen[1])),
    Enter: () => view.chosen === null && page.chooseFirst(),
    Escape: () => {
      view.chosen = null;
      view.critical = false;
      page.say();
    },
  };
  const act = keys[event.key];
  if (!act) return;
  event.preventDefault();
  act();
  page.redraw();
}
