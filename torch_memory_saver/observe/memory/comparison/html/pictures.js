
// The pictures of the page, drawn from `data` with the functions of tables.js; then the beginning of all.

// ---- Pictures: a canvas with shapes that can be pointed at and walked through by keys

// `find(x, y)` and `step(key)` return {text, stack, x, y, frame} or null.
function interact(canvas, find, step) {
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const found = find(event.clientX - box.left, event.clientY - box.top);
    tell(found && found.text, event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", () => tell(null));
  canvas.addEventListener("blur", () => tell(null));
  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect();
    const found = find(event.clientX - box.left, event.clientY - box.top);
    select(found ? found.stack : null);
  });
  canvas.addEventListener("keydown", (event) => {
    if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Enter"].includes(event.key)) return;
    event.preventDefault();
    const found = step(event.key);
    if (!found) return;
    if (event.key === "Enter") {
      select(found.stack);
      return;
    }
    drawPictures();
    const { context } = found;
    context.globalAlpha = 1;
    context.strokeStyle = palette.text;
    context.lineWidth = 2;
    context.strokeRect(...found.frame);
    const [left, top, width, height] = found.frame;
    const frame = canvas.parentElement;
    frame.scrollTop = Math.min(top, Math.max(frame.scrollTop, top + height - frame.clientHeight));
    const box = canvas.getBoundingClientRect();
    tell(found.text, box.left + left + Math.min(width, 40), box.top + top + Math.min(height, 20));
  });
}

function currentSnapshot() {
  return data.views[chosen.view].snapshots[chosen.snapshot];
}

// ---- The active-memory timeline

const MARGIN = 96;
const TIMELINE_HEIGHT = 340;
const FLOOR = TIMELINE_HEIGHT - 22;
const timeline = { column: 0, layer: 0 };

// The layers of a snapshot from the bottom up: {stack, first, last, at(column), text}.
function layersOf(picture, columns) {
  const end = Math.max(picture.events, 1);
  const columnOf = (event) => Math.min(Math.floor((event * columns) / end), columns);
  const folded = picture.layers.map(({ stack, values }) => ({
    stack,
    first: 0,
    last: columns,
    at: (column) => values[Math.min(Math.floor((column * values.length) / columns), values.length - 1)],
    text: (bytes) => `${data.stacks[stack].title}\n${mebibytes(bytes)} in small allocations`,
  }));
  const single = picture.allocations.map(([start, stop, bytes, stack]) => ({
    stack,
    first: columnOf(start),
    last: Math.max(columnOf(stop), columnOf(start) + 1),
    at: () => bytes,
    text: () => `${data.stacks[stack].title}\n${mebibytes(bytes)}, ${start === 0 ? "from the beginning" : `allocated by event ${start}`}, ${stop >= end ? "live" : `freed by event ${stop}`}`,
  }));
  return folded.concat(single);
}

function prepareTimelines() {
  for (const view of data.views) {
    for (const snapshot of view.snapshots) {
      const columns = 600;
      const heights = new Float64Array(columns);
      for (const layer of layersOf(snapshot.timeline, columns)) {
        for (let column = layer.first; column < Math.min(layer.last, columns); column++) heights[column] += layer.at(column);
      }
      snapshot.peak = heights.reduce((most, value) => Math.max(most, value), 0);
    }
    // All moments of a view have one scale, so that a rise is seen when the moment is changed.
    view.peak = Math.max(...view.snapshots.map((snapshot) => snapshot.peak), MIB / 16);
  }
}

function drawTimeline() {
  const { context, width } = prepare(byId("timeline"), TIMELINE_HEIGHT);
  const columns = Math.max(Math.floor(width - MARGIN), 50);
  const picture = currentSnapshot().timeline;
  const peak = data.views[chosen.view].peak * 1.03;
  const scale = (FLOOR - 6) / peak;
  drawScale(context, width, peak, scale);
  const heights = new Float64Array(columns);
  timeline.layers = layersOf(picture, columns);
  timeline.scale = scale;
  timeline.columns = columns;
  timeline.context = context;
  for (const layer of timeline.layers) {
    shade(context, layer.stack);
    const last = Math.min(layer.last, columns);
    let begin = layer.first;
    // Neighbouring columns of one height are one rectangle.
    while (begin < last) {
      const bytes = layer.at(begin);
      let stop = begin + 1;
      while (stop < last && heights[stop] === heights[begin] && layer.at(stop) === bytes) stop++;
      const bottom = heights[begin] * scale;
      const tall = bytes * scale;
      const gap = tall > 5 ? 0.6 : 0;
      context.fillRect(MARGIN + begin, FLOOR - bottom - tall + gap, stop - begin, tall - gap);
      heights.fill(heights[begin] + bytes, begin, stop);
      begin = stop;
    }
  }
  context.globalAlpha = 1;
  context.fillStyle = palette.soft;
  context.textAlign = "left";
  context.fillText("event 0", MARGIN, FLOOR + 16);
  context.textAlign = "right";
  context.fillText(`event ${picture.events.toLocaleString("en")}`, MARGIN + columns, FLOOR + 16);
}

function drawScale(context, width, peak, scale) {
  const rough = peak / 4;
  const power = 2 ** Math.floor(Math.log2(rough));
  context.strokeStyle = palette.line;
  context.fillStyle = palette.soft;
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.lineWidth = 1;
  for (let bytes = 0; bytes <= peak; bytes += power) {
    const y = Math.round(FLOOR - bytes * scale) + 0.5;
    context.beginPath();
    context.moveTo(MARGIN, y);
    context.lineTo(width, y);
    context.stroke();
    context.fillText(mebibytes(bytes), MARGIN - 8, y);
  }
}

// The layers of one column, from the bottom up, with the bytes below each.
function columnLayers(column) {
  let below = 0;
  const found = [];
  for (const layer of timeline.layers) {
    if (column < layer.first || column >= layer.last) continue;
    const bytes = layer.at(column);
    if (bytes > 0) found.push({ layer, bytes, below });
    below += bytes;
  }
  return found;
}

function describeLayer(column, { layer, bytes, below }) {
  return {
    text: `${layer.text(bytes)}\n${mebibytes(below)} below`,
    stack: layer.stack,
    context: timeline.context,
    frame: [MARGIN + column - 1, FLOOR - (below + bytes) * timeline.scale, 3, Math.max(bytes * timeline.scale, 2)],
  };
}

interact(
  byId("timeline"),
  (x, y) => {
    const column = Math.floor(x - MARGIN);
    const height = (FLOOR - y) / timeline.scale;
    const found = columnLayers(column).find(({ bytes, below }) => below <= height && height < below + bytes);
    return found ? describeLayer(column, found) : null;
  },
  (key) => {
    const stride = Math.max(Math.floor(timeline.columns / 60), 1);
    const move = { ArrowLeft: -stride, ArrowRight: stride }[key] || 0;
    timeline.column = Math.max(0, Math.min(timeline.columns - 1, timeline.column + move));
    const found = columnLayers(timeline.column);
    timeline.layer += { ArrowUp: 1, ArrowDown: -1 }[key] || 0;
    timeline.layer = Math.max(0, Math.min(found.length - 1, timeline.layer));
    return found.length ? describeLayer(timeline.column, found[timeline.layer]) : null;
  },
);

// ---- Segments

const BAR = 15;
const PITCH = 20;
const LABEL = 200;
const segments = { row: 0, block: 0 };

function drawSegments() {
  const { rows } = currentSnapshot().bars;
  const { context, width } = prepare(byId("segments"), Math.max(rows.length, 1) * PITCH + 2);
  const room = width - LABEL - 2;
  segments.context = context;
  segments.shapes = rows.map((row, number) => {
    const top = number * PITCH + 1;
    const scale = room / row.bytes;
    context.globalAlpha = 1;
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.fillStyle = row.held ? palette.text : palette.soft;
    context.fillText(`${mebibytes(row.bytes)}, ${((100 * row.live) / row.bytes).toFixed(0)}% live`, LABEL - 10, top + BAR / 2 + 1);
    const shapes = row.blocks.map(([offset, bytes, stack, awaiting, count]) => {
      const box = [LABEL + offset * scale, top, Math.max(bytes * scale, 1), BAR];
      shade(context, stack);
      context.fillRect(box[0], box[1], Math.max(box[2] - (box[2] > 4 ? 0.6 : 0), 1), BAR);
      const what = count > 1 ? `${count} neighbouring small blocks, ${mebibytes(bytes)}` : mebibytes(bytes);
      return { box, stack, text: `${data.stacks[stack].title}\n${what}${awaiting ? ", awaits its free" : ""}` };
    });
    context.globalAlpha = 1;
    if (row.state === "paused") {
      context.fillStyle = hatching(context);
      context.fillRect(LABEL, top, room, BAR);
    }
    context.strokeStyle = row.held ? palette.soft : palette.line;
    context.lineWidth = 1;
    context.strokeRect(LABEL + 0.5, top + 0.5, room - 1, BAR - 1);
    return { top, row, shapes };
  });
}

function segmentText({ row }) {
  const facts = [`Segment of ${mebibytes(row.bytes)}, ${mebibytes(row.live)} live`];
  if (row.held) facts.push(`${mebibytes(row.held)} held by few live bytes`);
  if (row.expandable) facts.push("expandable");
  if (row.private) facts.push("private pool");
  if (row.tag) facts.push(`tag "${row.tag}"`);
  if (row.state) facts.push(row.state);
  return facts.join(", ");
}

interact(
  byId("segments"),
  (x, y) => {
    const found = segments.shapes[Math.floor(y / PITCH)];
    if (!found || x < LABEL) return null;
    const block = found.shapes.find(({ box }) => x >= box[0] && x < box[0] + box[2]);
    const what = block ? block.text : "cached";
    return { text: `${what}\n${segmentText(found)}`, stack: block ? block.stack : null };
  },
  (key) => {
    if (!segments.shapes.length) return null;
    segments.row += { ArrowUp: -1, ArrowDown: 1 }[key] || 0;
    segments.row = Math.max(0, Math.min(segments.shapes.length - 1, segments.row));
    const { shapes, top, row } = segments.shapes[segments.row];
    segments.block += { ArrowLeft: -1, ArrowRight: 1 }[key] || 0;
    segments.block = Math.max(0, Math.min(shapes.length - 1, segments.block));
    const block = shapes[segments.block];
    const box = block ? block.box : [LABEL, top, 20, BAR];
    const text = `${block ? block.text : "cached"}\n${segmentText({ row })}`;
    return { text, stack: block ? block.stack : null, context: segments.context, frame: box };
  },
);

// ---- The choice of what is shown

function drawPictures() {
  if (!data.views.length) return;
  drawTimeline();
  drawSegments();
}

function showPictures() {
  const view = data.views[chosen.view];
  chosen.snapshot = Math.min(chosen.snapshot, view.snapshots.length - 1);
  const moments = view.snapshots.map((one, number) => {
    const label = make("label");
    const input = Object.assign(make("input"), { type: "radio", name: "moment", checked: number === chosen.snapshot });
    input.addEventListener("change", () => {
      chosen.snapshot = number;
      showHints();
      drawPictures();
    });
    label.append(input, " " + data.moments[one.moment]);
    return label;
  });
  byId("moments").replaceChildren(make("legend", "Moment"), ...moments);
  showHints();
  showLegend();
  drawPictures();
}

function showHints() {
  const { timeline: picture, bars } = currentSnapshot();
  const known = picture.events
    ? `${plural(picture.events, "recorded event")}; each layer is an allocation, on top of those made before it. All moments have one scale.`
    : "No history was recorded: the live blocks, without their past.";
  const folded = picture.folded ? ` The ${plural(picture.folded, "smallest allocation")} are folded by call stack, at the bottom.` : "";
  byId("timeline-hint").textContent = known + folded;
  const [count, bytes, live] = bars.folded;
  const rest = count ? ` ${plural(count, "more segment")} of ${mebibytes(bytes)} with ${mebibytes(live)} live are not drawn.` : "";
  byId("segments-hint").textContent =
    "A bar each, all of one length; those held by few live bytes come first, then by size." + rest;
}

// The stacks of most bytes in the view, and the signs.
function showLegend() {
  const weight = new Map();
  for (const { timeline: picture } of data.views[chosen.view].snapshots) {
    for (const [start, stop, bytes, stack] of picture.allocations) {
      if (stop >= picture.events) weight.set(stack, (weight.get(stack) || 0) + bytes);
    }
    for (const { stack, values } of picture.layers) weight.set(stack, (weight.get(stack) || 0) + values.at(-1));
  }
  const leaks = [...new Set(data.leaks.filter((row) => row.where === data.views[chosen.view].where).map((row) => row.stack))];
  const largest = [...weight].sort((one, other) => other[1] - one[1]).map(([stack]) => stack);
  const shown = [...new Set([...leaks.slice(0, 4), ...largest.slice(0, 6)])];
  const entries = shown.map((stack) => {
    const entry = make("li");
    entry.append(stackButton(stack));
    return entry;
  });
  byId("legend").replaceChildren(...entries, legendEntry("blank", "cached"), legendEntry("hatched", "paused"));
}

function start() {
  readPalette();
  byId("summary").textContent = `${plural(data.moments.length, "moment")}: ${data.moments.join(", ")}`;
  byId("notes").replaceChildren(...data.notes.map((note) => make("li", note)));
  showFindings();
  showTables();
  byId("close").addEventListener("click", () => select(null));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") select(null);
  });
  if (!data.views.length) return;
  prepareTimelines();
  chosen.snapshot = data.views[0].snapshots.length - 1;
  const choice = byId("view");
  data.views.forEach((view, number) => choice.append(Object.assign(make("option", view.where), { value: number })));
  choice.addEventListener("change", () => {
    chosen.view = Number(choice.value);
    showPictures();
  });
  showPictures();
  window.addEventListener("resize", drawPictures);
  onColourScheme(() => {
    document.querySelectorAll("[data-stack]").forEach((box) => (box.style.background = colour(Number(box.dataset.stack))));
    drawPictures();
  });
}

start();
