
// The sections of the page, moving and zooming in time, and the start.

// A picture shows at least so many nanoseconds, and so large a part of the whole that its times differ as numbers.
const SHORTEST = 1000;
const SMALLEST_PART = 1e-12;
const ZOOM = 1.6;

// ---- Time

function show(host, from, to) {
  const shortest = Math.min(Math.max(SHORTEST, host.length * SMALLEST_PART), host.length);
  const length = Math.min(Math.max(to - from, shortest), host.length);
  host.from = Math.max(0, Math.min(from, host.length - length));
  host.to = host.from + length;
  if (host.waits) return;
  host.waits = true;
  requestAnimationFrame(() => {
    host.waits = false;
    redraw(host);
  });
}

function zoom(host, factor, around) {
  const length = (host.to - host.from) / factor;
  const share = (around - host.from) / (host.to - host.from);
  show(host, around - share * length, around + (1 - share) * length);
}

function redraw(host) {
  const widths = new Map();
  for (const picture of host.pictures) {
    const count = columnCount(picture.canvas.parentElement.clientWidth);
    if (widths.get(picture.gpu) !== count) picture.gpu.columns = columnsOf(picture.gpu, host.from, host.to, count);
    widths.set(picture.gpu, count);
    draw(picture);
  }
  const step = (host.to - host.from) / 100;
  host.range.textContent = `${clock(host.from, step, host.length)} to ${clock(host.to, step, host.length)}`;
}

function redrawAll() {
  data.hosts.forEach(redraw);
}

// ---- Pointing, dragging, keys

function timeAt(picture, x) {
  const { host, count } = picture;
  return host.from + ((x - MARGIN) / count) * (host.to - host.from);
}

function moveCursors(host, x) {
  for (const { cursor, count } of host.pictures) {
    cursor.hidden = x === null || x < MARGIN || x > MARGIN + count;
    if (!cursor.hidden) cursor.style.left = x + "px";
  }
}

function interact(picture) {
  const { canvas, host, selection } = picture;
  let drag = null;
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    drag = { x: place(event).x, from: host.from, to: host.to, selects: event.shiftKey };
    tell(null);
  });
  canvas.addEventListener("pointermove", (event) => {
    const { x, y } = place(event);
    if (drag && drag.selects) {
      selection.hidden = false;
      selection.style.left = Math.min(x, drag.x) + "px";
      selection.style.width = Math.abs(x - drag.x) + "px";
    } else if (drag) {
      const shift = ((drag.x - x) / picture.count) * (drag.to - drag.from);
      show(host, drag.from + shift, drag.to + shift);
    } else {
      moveCursors(host, x);
      tell(describe(picture, x, y), event.clientX, event.clientY);
    }
  });
  const end = (event) => {
    const { x } = place(event);
    if (drag && drag.selects && Math.abs(x - drag.x) > 3) show(host, timeAt(picture, Math.min(x, drag.x)), timeAt(picture, Math.max(x, drag.x)));
    drag = null;
    selection.hidden = true;
  };
  canvas.addEventListener("pointerup", end);
  canvas.addEventListener("pointercancel", end);
  canvas.addEventListener("pointerleave", () => {
    tell(null);
    moveCursors(host, null);
  });
  canvas.addEventListener("dblclick", (event) => zoom(host, 4, timeAt(picture, place(event).x)));
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (event.ctrlKey || event.metaKey) zoom(host, event.deltaY < 0 ? ZOOM : 1 / ZOOM, timeAt(picture, place(event).x));
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        const shift = (event.deltaX / picture.count) * (host.to - host.from);
        show(host, host.from + shift, host.to + shift);
      } else return;
      event.preventDefault();
    },
    { passive: false },
  );
  canvas.addEventListener("blur", () => {
    tell(null);
    moveCursors(host, null);
  });
  canvas.addEventListener("keydown", (event) => keyed(picture, event));
}

function keyed(picture, event) {
  const { host } = picture;
  const stride = (host.to - host.from) / 60;
  const middle = host.cursor >= host.from && host.cursor <= host.to ? host.cursor : (host.from + host.to) / 2;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "+" || event.key === "=") zoom(host, ZOOM, middle);
  else if (event.key === "-") zoom(host, 1 / ZOOM, middle);
  else if (event.key === "0") show(host, 0, host.length);
  else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
    host.cursor = Math.max(0, Math.min(middle + (event.key === "ArrowLeft" ? -stride : stride), host.length));
    if (host.cursor < host.from || host.cursor > host.to) show(host, host.from + host.cursor - middle, host.to + host.cursor - middle);
    atCursor(picture, false);
  } else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
    const calls = event.key === "ArrowDown" ? picture.calls : [...picture.calls].reverse();
    const next = calls.find((call) => (event.key === "ArrowDown" ? call.at > middle : call.at < middle));
    if (next) {
      host.cursor = next.at;
      if (next.at < host.from || next.at > host.to) show(host, next.at - stride * 30, next.at + stride * 30);
      atCursor(picture, true);
    }
  } else return;
  event.preventDefault();
}

function atCursor(picture, inLane) {
  requestAnimationFrame(() => {
    const { host, canvas, count } = picture;
    const x = xOf(host, host.cursor, count);
    const y = inLane ? picture.floor + LANE.gap + 1 : picture.zero - 10;
    const box = canvas.getBoundingClientRect();
    moveCursors(host, x);
    tell(describe(picture, x, y), box.left + x, box.top + y);
  });
}

// ---- Sections

function button(text, name, action) {
  const element = make("button", text);
  element.type = "button";
  element.setAttribute("aria-label", name);
  element.addEventListener("click", action);
  return element;
}

function addPicture(box, host, gpu, process, title, note) {
  const heading = make(process === null ? "h3" : "h4", keepNumbers(title));
  const facts = make("span", undefined, "minor");
  heading.append(facts);
  const frame = make("div", undefined, "picture");
  const canvas = make("canvas");
  const cursor = make("div", undefined, "cursor");
  const selection = make("div", undefined, "selection");
  cursor.hidden = selection.hidden = true;
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  frame.append(canvas, cursor, selection);
  box.append(heading, frame);
  const place = gpu.places.get(process);
  const up = process === null ? 0 : 1 + place;
  const down = process === null ? null : 1 + gpu.ordinals.size + place;
  const picture = { host, gpu, process, canvas, cursor, selection, up, down, calls: callsOf(host, gpu, process) };
  picture.peak = peakOf(host.whole.get(gpu)[up].totals);
  picture.backupPeak = down === null ? 0 : peakOf(host.whole.get(gpu)[down].totals);
  const parts = [process === null ? `at most ${size(picture.peak)}${freeText(picture)}` : `at most ${size(picture.peak)} reserved`];
  if (picture.backupPeak) parts.push(`${size(picture.backupPeak)} in backups`);
  if (process !== null && picture.calls.length) parts.push(plural(picture.calls.length, "call"));
  facts.textContent = [...parts, note].filter(Boolean).join(", ");
  canvas.setAttribute("aria-label", `${title}: ${facts.textContent}`);
  host.pictures.push(picture);
  interact(picture);
}

function callsOf(host, gpu, process) {
  if (process === null) return [];
  return host.processes[process].calls.filter(({ devices }) => !devices.length || devices.includes(gpu.ordinals.get(process)));
}

function addHost(host) {
  host.from = 0;
  host.length = Math.max(host.length, 1);
  host.to = host.length;
  host.cursor = -1;
  host.pictures = [];
  host.gpus = host.gpus.map(unpack);
  host.whole = new Map(host.gpus.map((gpu) => [gpu, columnsOf(gpu, 0, host.length, 2048)]));
  const box = make("section");
  const head = make("div", undefined, "host-head");
  host.range = make("span", undefined, "range");
  const middle = () => (host.from + host.to) / 2;
  head.append(
    make("h2", keepNumbers(host.name)),
    host.range,
    button("−", "Zoom out", () => zoom(host, 1 / ZOOM, middle())),
    button("+", "Zoom in", () => zoom(host, ZOOM, middle())),
    button("All", "Show all", () => show(host, 0, host.length)),
  );
  box.append(head);
  byId("hosts").append(box);
  for (const gpu of host.gpus) {
    addPicture(box, host, gpu, null, gpu.name, gpu.uuid);
    for (const process of gpu.ordinals.keys()) {
      const ordinal = gpu.ordinals.get(process);
      const several = new Set(gpu.ordinals.values()).size > 1;
      addPicture(box, host, gpu, process, host.processes[process].name + (several ? `, its device ${ordinal}` : ""), "");
    }
  }
  if (!host.gpus.length) box.append(make("p", "No event of this machine changes memory.", "hint"));
}

// ---- The legend: tags can be picked out

function paint(box) {
  const { phase, tag, place } = box.dataset;
  box.style.background = phase ? phaseColour(phase) : colour(Number(tag), Number(place));
}

function phaseEntry(phase) {
  const entry = legendEntry("phase", PHASE_TEXTS[phase]);
  entry.firstChild.dataset.phase = phase;
  paint(entry.firstChild);
  return entry;
}

function showLegend() {
  const used = new Map(); // tag -> the place of a process that has it, whose shade the swatch gets
  const gpus = data.hosts.flatMap((host) => host.gpus);
  for (const gpu of gpus) {
    for (const [process, , tag] of gpu.bands) if (tag >= 0 && !used.has(tag)) used.set(tag, gpu.places.get(process));
  }
  const tags = [...used.keys()].sort((one, other) => one - other).slice(0, 24);
  const entries = tags.map((tag) => {
    const entry = make("li");
    const pick = make("button", undefined, "tag");
    const box = make("span", undefined, "swatch");
    box.dataset.tag = tag;
    box.dataset.place = used.get(tag);
    paint(box);
    pick.type = "button";
    pick.setAttribute("aria-pressed", "false");
    pick.append(box, tagName(tag));
    pick.title = data.tags[tag];
    pick.addEventListener("click", () => {
      chosen.tag = chosen.tag === tag ? null : tag;
      document.querySelectorAll("button.tag").forEach((one) => one.setAttribute("aria-pressed", String(one === pick && chosen.tag !== null)));
      redrawAll();
    });
    entry.append(pick);
    return entry;
  });
  if (used.size > tags.length) entries.push(make("li", `and ${plural(used.size - tags.length, "tag")} more`));
  const folds = gpus.some(({ bands }) => bands.some(([, , , folded]) => folded));
  if (folds) entries.push(legendEntry("folded", "tags with less memory, together"));
  const signs = [["hatched", "paused"], ["below", "below the line: backups"], ["other", "other"], ["line", "memory of the GPU"]];
  const calls = [["pause", "pause"], ["resume", "resume"], ["failed", "failed"]];
  const others = [...signs, ...calls].map(([name, text]) => legendEntry(name, text));
  byId("legend").replaceChildren(...entries, ...others, ...Object.keys(PHASE_TEXTS).map(phaseEntry));
}

function start() {
  readPalette();
  const processes = data.hosts.reduce((sum, host) => sum + host.processes.length, 0);
  byId("summary").textContent = `${processes === 1 ? "1 process" : `${processes} processes`} on ${plural(data.hosts.length, "machine")}`;
  byId("notes").replaceChildren(...data.notes.map((note) => make("li", note)));
  data.hosts.forEach(addHost);
  showLegend();
  redrawAll();
  window.addEventListener("resize", redrawAll);
  onColourScheme(() => {
    document.querySelectorAll("[data-tag], [data-phase]").forEach(paint);
    redrawAll();
  });
  document.documentElement.dataset.openedMs = performance.now().toFixed(0);
}

start();
