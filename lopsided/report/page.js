"use strict";
// The timeline looked at closely: zoom, move, and go from block to block. All that is drawn is in the page already.
(() => {
  const told = JSON.parse(document.getElementById("blocks").textContent);
  const scroller = document.querySelector(".scroller");
  const sheet = document.querySelector(".sheet");
  const axis = document.querySelector(".axis");
  const layers = document.querySelector(".layers");
  const readout = document.getElementById("readout");
  const lanes = [...document.querySelectorAll(".lane")].map((svg, k) => ({
    svg, label: told.lanes[k][0], blocks: told.lanes[k][1], rects: [...svg.querySelectorAll(":scope > rect")],
    names: svg.querySelector(".labels"),
  }));
  const MOST = 400;
  let zoom = 1, at = null;

  const make = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const percent = (seconds) => `${(seconds / told.step_s) * 100}%`;
  const seconds = (s) => {
    if (s === 0) return "0";
    const [number, unit] = s >= 0.9995 ? [s, "s"] : s >= 0.9995e-3 ? [s * 1e3, "ms"] : [s * 1e6, "µs"];
    return `${number.toFixed(number >= 99.95 ? 0 : number >= 9.995 ? 1 : 2)} ${unit}`;
  };

  // Drawing what depends on the width: ticks, and names where there is room for them.
  const ticks = () => {
    const most = Math.max(2, Math.floor((scroller.clientWidth * zoom) / 110));
    const power = 10 ** Math.floor(Math.log10(told.step_s / most));
    const gap = power * [1, 2, 5, 10, 20].find((k) => told.step_s / (power * k) <= most);
    const [from, to] = seen();
    const digits = Math.max(0, -Math.floor(Math.log10(gap * 1e3)));
    const marks = [];
    for (let k = Math.max(0, Math.floor(from / gap)); k * gap <= Math.min(to + gap, told.step_s); k++) {
      const x = percent(k * gap);
      marks.push(make("line", { x1: x, x2: x, y1: 12, y2: 18 }));
      const near = 1 - (k * gap) / told.step_s < 30 / (scroller.clientWidth * zoom);
      const style = k === 0 ? { class: "first" } : {};
      if (!near) marks.push(make("text", { x, y: 10, ...style }, k ? `${(k * gap * 1e3).toFixed(digits)} ms` : "0"));
    }
    axis.replaceChildren(...marks);
  };
  const seen = () => {
    const whole = scroller.clientWidth * zoom;
    return [(scroller.scrollLeft / whole) * told.step_s, ((scroller.scrollLeft + scroller.clientWidth) / whole) * told.step_s];
  };
  const fitting = (name, pixels) => {
    const room = Math.floor((pixels - 8) / 6.4);
    return name.length <= room ? name : room >= 6 ? `${name.slice(0, room - 1)}…` : "";
  };
  const names = () => {
    const [from, to] = seen(), scale = (scroller.clientWidth * zoom) / told.step_s;
    for (const lane of lanes) {
      const made = [];
      if (zoom > 1.5 && lane.svg.clientHeight > 20) {
        lane.blocks.forEach(([start, taken, what], k) => {
          if (start + taken < from || start > to) return;
          const left = Math.max(start, from);
          const text = fitting(told.strings[what], (start + taken - left) * scale);
          if (text) made.push(make("text", { x: percent(left), dx: 4, y: 17, class: `on-${lane.rects[k].classList[0]}` }, text));
        });
      }
      lane.names.replaceChildren(...made);
    }
    for (const old of layers.querySelectorAll("text")) old.remove();
    for (const [name, start, end] of told.layers) {
      const left = Math.max(start, from);
      if (end < from || start > to) continue;
      const pixels = (end - left) * scale, number = name.match(/[0-9]+$/);
      const text = name.length * 6.4 + 6 <= pixels ? name : number && number[0].length * 6.4 + 4 <= pixels ? number[0] : "";
      if (text) layers.append(make("text", { x: percent(left), dx: 3, y: 11 }, text));
    }
  };
  let asked = false;
  const draw = () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; ticks(); names(); });
  };

  // Zooming keeps what is under the pointer, or in the middle, where it is.
  const zoomTo = (to, pixel = scroller.clientWidth / 2) => {
    const before = (scroller.scrollLeft + pixel) / (scroller.clientWidth * zoom);
    zoom = Math.min(Math.max(to, 1), MOST);
    sheet.style.width = `${zoom * 100}%`;
    sheet.classList.toggle("near", zoom >= 4);
    scroller.scrollLeft = before * scroller.clientWidth * zoom - pixel;
    scroller.dataset.zoom = zoom;
    draw();
  };
  const placed = () => {
    if (!at) return undefined;
    const [start, taken] = lanes[at[0]].blocks[at[1]];
    const pixel = ((start + taken / 2) / told.step_s) * scroller.clientWidth * zoom - scroller.scrollLeft;
    return pixel >= 0 && pixel <= scroller.clientWidth ? pixel : undefined;
  };

  // A cursor that goes from block to block.
  const tell = (lane, k) => {
    const { label, blocks } = lanes[lane];
    const [start, taken, what, more] = blocks[k];
    const name = document.createElement("b");
    name.textContent = told.strings[what];
    const part = ((taken / told.step_s) * 100).toFixed(1);
    readout.replaceChildren(name, `  ${seconds(taken)}, ${part} % of the step, from ${seconds(start)}`, document.createElement("br"), `${label}  ·  ${told.strings[more]}`);
  };
  const select = (lane, k) => {
    if (at) lanes[at[0]].rects[at[1]].classList.remove("at");
    at = [lane, k];
    lanes[lane].rects[k].classList.add("at");
    tell(lane, k);
    const [start, taken] = lanes[lane].blocks[k], whole = scroller.clientWidth * zoom;
    const left = (start / told.step_s) * whole, right = ((start + taken) / told.step_s) * whole;
    if (left < scroller.scrollLeft || right > scroller.scrollLeft + scroller.clientWidth)
      scroller.scrollLeft = (left + right) / 2 - scroller.clientWidth / 2;
  };
  const nearest = (lane, time) => {
    const { blocks } = lanes[lane];
    let best = 0;
    blocks.forEach(([start, taken], k) => {
      const off = ([s, t]) => Math.max(s - time, time - s - t, 0);
      if (off([start, taken]) < off(blocks[best])) best = k;
    });
    return best;
  };
  const move = (lanesDown, blocksOn) => {
    if (!at) {
      const [from, to] = seen();
      return select(0, nearest(0, zoom > 1 ? (from + to) / 2 : 0));
    }
    const [lane, k] = at, next = lane + lanesDown;
    if (lanesDown && next >= 0 && next < lanes.length) {
      const [start, taken] = lanes[lane].blocks[k];
      select(next, nearest(next, start + taken / 2));
    } else if (blocksOn) select(lane, Math.min(Math.max(k + blocksOn, 0), lanes[lane].blocks.length - 1));
  };
  const keys = {
    "+": () => zoomTo(zoom * 1.5, placed()), "=": () => zoomTo(zoom * 1.5, placed()), "-": () => zoomTo(zoom / 1.5, placed()),
    0: () => zoomTo(1), ArrowLeft: () => move(0, -1), ArrowRight: () => move(0, 1), ArrowUp: () => move(-1, 0), ArrowDown: () => move(1, 0),
    Home: () => select(at ? at[0] : 0, 0), End: () => select(at ? at[0] : 0, lanes[at ? at[0] : 0].blocks.length - 1),
  };
  scroller.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
  for (const button of document.querySelectorAll("[data-zoom]"))
    button.addEventListener("click", () => zoomTo({ in: zoom * 1.5, out: zoom / 1.5, all: 1 }[button.dataset.zoom], placed()));

  // The mouse.
  scroller.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoomTo(zoom * Math.exp(-event.deltaY / 300), event.clientX - scroller.getBoundingClientRect().left);
  }, { passive: false });
  let held = null;
  scroller.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse" && event.button === 0) held = [event.clientX, scroller.scrollLeft];
  });
  addEventListener("pointermove", (event) => {
    if (!held) return;
    scroller.classList.add("held");
    scroller.scrollLeft = held[1] + held[0] - event.clientX;
  });
  addEventListener("pointerup", () => { held = null; scroller.classList.remove("held"); });
  scroller.addEventListener("dblclick", (event) => zoomTo(zoom * 2.5, event.clientX - scroller.getBoundingClientRect().left));
  const under = (event) => {
    const lane = lanes.findIndex(({ svg }) => svg === event.target.parentNode);
    return lane < 0 ? null : [lane, lanes[lane].rects.indexOf(event.target)];
  };
  scroller.addEventListener("pointerover", (event) => { const found = under(event); if (found) tell(...found); });
  scroller.addEventListener("click", (event) => { const found = under(event); if (found) select(...found); });

  scroller.addEventListener("scroll", draw, { passive: true });
  addEventListener("resize", draw);
  addEventListener("beforeprint", () => { for (const each of document.querySelectorAll("details")) each.open = true; });
  zoomTo(1);
})();
