
// The drawing. A picture is a canvas of one GPU, of all that is on it or of one process. All pictures of a host show the same
// time: host.from to host.to. views.js follows, in the same scope.

const PALETTE = ["page", "text", "soft", "line", "leak", "other", "unknown", "hatch", "lightness", "pause", "resume", "total", "veil"];
// The hues of tags. Purple and green are the hues of calls and their phases, red is that of failures.
const HUES = [212, 30, 332, 186, 54, 238, 96, 312, 20, 200];
const SHADES = [0, -8, 8, -14]; // of the processes on a GPU
const MARGIN = 84;
const RIGHT = 8;
const TOP = 8;
const AXIS = 20;
const GPU_HEIGHT = 220;
const PROCESS_HEIGHT = 190;
const LANE = { calls: 9, phase: 4, gap: 3 };
const LANE_HEIGHT = LANE.calls + 3 * LANE.phase + 2 * LANE.gap;
// Which of the three rows of phases; those of the whole call are in the first.
const PHASE_ROWS = { copy: 1, create: 2, map: 2 };
const PHASE_HUES = { turn: 0, wait: 0, synchronize: 262, plan: 275, copy: 282, unmap: 290, discard: 290, create: 165, map: 145 };
// The saturation and the contrast to the page, in percent. A negative contrast is lower than that of tags.
const PHASE_TONES = {
  turn: [0, -10], wait: [0, -10], synchronize: [12, 18], plan: [60, -16], copy: [30, 36], unmap: [70, 8], discard: [70, 8],
  create: [50, -8], map: [60, 34],
};
const NEAR = 4;

// One phase of each colour, with the text for the legend.
const PHASE_TEXTS = {
  turn: "waits", synchronize: "waits for the GPU", plan: "plans", copy: "copies",
  unmap: "releases", create: "creates memory", map: "maps memory",
};

function phaseColour(name) {
  const [saturation, contrast] = PHASE_TONES[name] ?? PHASE_TONES.turn;
  const lightness = parseFloat(palette.lightness);
  return `hsl(${PHASE_HUES[name] ?? 0} ${saturation}% ${lightness > 50 ? lightness - contrast : lightness + contrast}%)`;
}

const chosen = { tag: null };

// Of a tag of the process that has this place on its GPU.
function colour(tag, place) {
  if (tag < 0) return palette.unknown;
  const saturation = [58, 90, 30][Math.floor(tag / HUES.length) % 3];
  return `hsl(${HUES[tag % HUES.length]} ${saturation}% ${parseFloat(palette.lightness) + SHADES[place % SHADES.length]}%)`;
}

function bandColour(gpu, [process, kind, tag]) {
  return kind === "other" ? palette.other : colour(tag, gpu.places.get(process));
}

function columnCount(width) {
  return Math.max(Math.floor(width - MARGIN - RIGHT), 20);
}

function xOf(host, time, count) {
  return MARGIN + ((time - host.from) / (host.to - host.from)) * count;
}

function draw(picture) {
  const { host, gpu } = picture;
  const { context, width, height } = prepare(picture.canvas, picture.process === null ? GPU_HEIGHT : PROCESS_HEIGHT);
  picture.context = context;
  picture.count = columnCount(width);
  picture.floor = height - AXIS - (picture.process === null ? 0 : LANE_HEIGHT);
  const up = Math.max(picture.peak, picture.process === null ? gpu.total : 0, 1) * 1.03;
  const down = picture.backupPeak * 1.03;
  picture.zero = TOP + ((picture.floor - TOP) * up) / (up + down);
  picture.scale = (picture.floor - TOP) / (up + down);
  drawAxes(picture, up, down);
  if (picture.process === null) drawUnknown(picture, Math.max(...unknownUntil(picture).map(([, begin]) => begin), 0), 0.5);
  const columns = gpu.columns;
  drawStack(picture, gpu.stacks[picture.up], columns[picture.up], 1);
  if (picture.down !== null) drawStack(picture, gpu.stacks[picture.down], columns[picture.down], -1);
  context.globalAlpha = 1;
  context.strokeStyle = palette.soft;
  context.beginPath();
  context.moveTo(MARGIN, Math.round(picture.zero) + 0.5);
  context.lineTo(MARGIN + picture.count, Math.round(picture.zero) + 0.5);
  context.stroke();
  if (picture.process === null) drawTotal(picture);
  else drawProcess(picture);
}

function drawAxes(picture, up, down) {
  const { host, context, count, zero, scale, floor } = picture;
  context.strokeStyle = palette.line;
  context.fillStyle = palette.soft;
  context.lineWidth = 1;
  context.textAlign = "right";
  context.textBaseline = "middle";
  const { step, textScale } = sizeTicks(up, down);
  for (let bytes = -Math.floor(down / step) * step; bytes <= up; bytes += step) {
    const y = Math.round(zero - bytes * scale) + 0.5;
    context.beginPath();
    context.moveTo(MARGIN, y);
    context.lineTo(MARGIN + count, y);
    context.stroke();
    context.fillText(size(Math.abs(bytes), textScale), MARGIN - 8, y);
  }
  const { step: distance, times } = ticks(host.from, host.to, Math.max(Math.floor(count / 130), 2));
  context.textAlign = "center";
  for (const time of times) {
    const x = Math.round(xOf(host, time, count)) + 0.5;
    context.beginPath();
    context.moveTo(x, TOP);
    context.lineTo(x, floor);
    context.stroke();
    const text = clock(time, distance, host.length);
    const half = context.measureText(text).width / 2;
    context.fillText(text, Math.min(Math.max(x, MARGIN + half), MARGIN + count + RIGHT - half), picture.canvas.clientHeight - AXIS / 2);
  }
}

// The bands of a stack on top of each other; with direction -1 below the line.
function drawStack(picture, bands, { values }, direction) {
  const { context, gpu, count, zero, scale } = picture;
  const bases = new Float64Array(count);
  for (const [place, number] of order(gpu, bands)) {
    const [, kind, tag] = gpu.bands[number];
    const sizes = values[place];
    const path = new Path2D();
    let column = 0;
    while (column < count) {
      let stop = column + 1;
      while (stop < count && sizes[stop] === sizes[column] && bases[stop] === bases[column]) stop++;
      if (sizes[column] > 0) {
        const begin = zero - direction * bases[column] * scale;
        const end = zero - direction * (bases[column] + sizes[column]) * scale;
        path.rect(MARGIN + column, Math.min(begin, end), stop - column, Math.abs(end - begin));
      }
      column = stop;
    }
    for (let each = 0; each < count; each++) bases[each] += sizes[each];
    const strength = { resident: 1, paused: 0.22, backup: 0.5, other: 1 }[kind];
    context.globalAlpha = strength * (chosen.tag === null || chosen.tag === tag ? 1 : 0.2);
    context.fillStyle = bandColour(gpu, gpu.bands[number]);
    context.fill(path);
    if (kind === "paused") {
      context.globalAlpha = chosen.tag === null || chosen.tag === tag ? 0.8 : 0.2;
      context.fillStyle = hatching(context);
      context.fill(path);
    }
  }
}

// The bands from the line outwards, as [place in the stack, number]: by process; what is resident before what is paused;
// what others hold at the end.
function order(gpu, bands) {
  const rank = (number) => KINDS.indexOf(gpu.bands[number][1]);
  return bands.map((number, place) => [place, number]).sort(([, one], [, other]) => rank(one) - rank(other) || one - other);
}

function drawTotal({ context, gpu, count, zero, scale }) {
  if (!gpu.total) return;
  const y = Math.round(zero - gpu.total * scale) + 0.5;
  context.save();
  context.strokeStyle = palette.total;
  context.setLineDash([6, 4]);
  context.beginPath();
  context.moveTo(MARGIN, y);
  context.lineTo(MARGIN + count, y);
  context.stroke();
  context.restore();
}

// The processes on the GPU whose first events were dropped, each with the time from which its levels are known.
function unknownUntil({ host, gpu }) {
  const processes = [...gpu.ordinals.keys()].map((number) => host.processes[number]);
  return processes.filter(({ dropped, begin }) => dropped && begin > 0).map((process) => [process, process.begin]);
}

function drawUnknown({ host, context, count, floor }, until, strength) {
  const end = Math.min(xOf(host, until, count), MARGIN + count);
  if (end <= MARGIN) return;
  context.globalAlpha = strength;
  context.fillStyle = hatching(context);
  context.fillRect(MARGIN, TOP, end - MARGIN, floor - TOP);
  context.globalAlpha = 1;
}

// Where the record of a process begins and ends, and its calls.
function drawProcess(picture) {
  const { host, context, count, floor } = picture;
  const process = host.processes[picture.process];
  const begin = Math.min(Math.max(xOf(host, process.begin, count), MARGIN), MARGIN + count);
  const taken = Math.min(Math.max(xOf(host, process.taken, count), MARGIN), MARGIN + count);
  if (process.dropped) {
    drawUnknown(picture, process.begin, 1);
    if (host.from <= process.begin && process.begin <= host.to) {
      context.strokeStyle = palette.leak;
      context.setLineDash([4, 3]);
      context.beginPath();
      context.moveTo(begin + 0.5, TOP);
      context.lineTo(begin + 0.5, floor);
      context.stroke();
      context.setLineDash([]);
      label(context, `begins here: ${process.dropped.toLocaleString("en")} earlier events dropped`, begin, count);
    }
  }
  if (!process.exited && taken < MARGIN + count) {
    context.fillStyle = palette.veil;
    context.fillRect(taken, TOP, MARGIN + count - taken, floor - TOP);
  }
  drawCalls(picture, process);
}

function label(context, text, x, count) {
  context.textBaseline = "top";
  const width = context.measureText(text).width + 8;
  const left = Math.min(x + 3, MARGIN + count - width);
  context.fillStyle = palette.page;
  context.globalAlpha = 0.85;
  context.fillRect(left, TOP, width, 17);
  context.globalAlpha = 1;
  context.fillStyle = palette.text;
  context.textAlign = "left";
  context.fillText(text, left + 4, TOP + 3);
}

function drawCalls(picture, process) {
  const { host, context, count, floor } = picture;
  const top = floor + LANE.gap;
  const last = new Map(); // the pixel that each colour has reached: what lies on it is not seen
  for (const call of picture.calls) {
    const left = Math.max(xOf(host, call.at, count), MARGIN);
    const right = Math.min(xOf(host, call.at + call.ns, count), MARGIN + count);
    if (right < MARGIN || left > MARGIN + count) continue;
    const fill = call.status ? palette.leak : call.what === "pause" ? palette.pause : call.what === "resume" ? palette.resume : palette.soft;
    if (right < (last.get(fill) ?? -1)) continue;
    const wide = Math.max(right - left, 1.5);
    last.set(fill, left + wide);
    context.fillStyle = fill;
    context.fillRect(left, top, wide, LANE.calls);
    if (wide > 12) drawPhases(picture, call, top + LANE.calls + 1);
  }
  context.fillStyle = palette.leak;
  for (const failure of process.failures) {
    const x = xOf(host, failure.at, count);
    if (!concerns(picture, failure) || x < MARGIN || x > MARGIN + count) continue;
    context.beginPath();
    context.moveTo(x - 4, floor - 8);
    context.lineTo(x + 4, floor - 8);
    context.lineTo(x, floor);
    context.fill();
  }
}

function concerns(picture, failure) {
  return failure.device < 0 || failure.device === picture.gpu.ordinals.get(picture.process);
}

function drawPhases({ host, gpu, context, count, process }, call, top) {
  for (const [name, device, after, ns] of call.phases) {
    if (device >= 0 && device !== gpu.ordinals.get(process)) continue;
    const left = Math.max(xOf(host, call.at + after, count), MARGIN);
    const right = Math.min(xOf(host, call.at + after + ns, count), MARGIN + count);
    if (right <= left) continue;
    context.fillStyle = phaseColour(name);
    context.fillRect(left, top + (PHASE_ROWS[name] || 0) * LANE.phase, Math.max(right - left, 0.5), LANE.phase - 1);
  }
}

// ---- What is under a point

function columnTexts(picture, column) {
  const { host, gpu } = picture;
  const lines = [];
  for (const [stack, title] of [[picture.up, picture.process === null ? "used" : "reserved"], [picture.down, "backups"]]) {
    if (stack === null) continue;
    const { totals, values } = gpu.columns[stack];
    for (const [place, number] of order(gpu, gpu.stacks[stack]).reverse()) {
      const bytes = values[place][column];
      if (bytes > 0) lines.push(`\u2003${size(bytes)} ${bandText(picture, gpu.bands[number], host)}`);
    }
    if (totals[column] > 0 || stack === picture.up) lines.push(`${size(totals[column])} ${title}${freeText(picture, totals[column])}`);
  }
  return lines;
}

function freeText(picture, used) {
  const { gpu } = picture;
  const knowsOthers = gpu.bands.some(([, kind]) => kind === "other");
  if (picture.process !== null || !gpu.total) return "";
  return knowsOthers ? ` of ${size(gpu.total)}` : ` by these processes, of ${size(gpu.total)}`;
}

function bandText(picture, [process, kind, tag, folded], host) {
  if (kind === "other") return "other: not held by these processes";
  const name = folded ? plural(folded, "other tag") : `"${tagName(tag)}"`;
  const owner = picture.process === null && picture.gpu.ordinals.size > 1 ? `, ${host.processes[process].name}` : "";
  return `${name} ${kind}${owner}`;
}

function momentText(picture, time) {
  const { host } = picture;
  const wall = new Date(host.beginMs + time / 1e6);
  const text = clock(time, Math.max((host.to - host.from) / 1000, 1), host.length);
  if (Number.isNaN(wall.getTime())) return text; // no file of ours
  return `${text} (${wall.toISOString().replace("T", " ").replace("Z", " UTC")})`;
}

function describeColumn(picture, column) {
  const { host } = picture;
  const time = host.from + ((host.to - host.from) * (column + 0.5)) / picture.count;
  const lines = [momentText(picture, time)];
  const process = picture.process === null ? null : host.processes[picture.process];
  if (process && time < process.begin) lines.push(process.dropped ? "unknown: these events were dropped" : "nothing yet");
  else lines.push(...columnTexts(picture, column));
  if (!process) {
    for (const [one, begin] of unknownUntil(picture)) if (time < begin) lines.push(`without ${one.name}, whose events were dropped`);
  }
  if (process && time > process.taken) lines.push(process.exited ? "The process has exited." : "Not recorded any more: the last known levels.");
  return lines.join("\n");
}

// The call or failure at a point of the lane, or null: the nearest, and of several that hold the point the shortest.
function findCall(picture, x) {
  const { host, count } = picture;
  let best = null;
  let nearest = NEAR;
  for (const call of picture.calls) {
    const left = xOf(host, call.at, count);
    const right = Math.max(xOf(host, call.at + call.ns, count), left + 1.5);
    const distance = Math.max(left - x, x - right, 0);
    if (distance < nearest || (distance === nearest && best && call.ns < best.ns)) {
      nearest = distance;
      best = call;
    }
  }
  return best;
}

function findFailure(picture, x) {
  const { host, count, process } = picture;
  return host.processes[process].failures.find((one) => concerns(picture, one) && Math.abs(xOf(host, one.at, count) - x) <= NEAR);
}

function describe(picture, x, y) {
  if (picture.process !== null && y > picture.floor - 9) {
    const failure = findFailure(picture, x);
    if (failure && (y <= picture.floor || !findCall(picture, x))) {
      const tag = data.tags[failure.tag] && tagName(failure.tag);
      return `${momentText(picture, failure.at)}\n${failure.what} of ${size(failure.bytes)}${tag ? `, "${tag}"` : ""} ${failureText(failure.status, failure.result)}`;
    }
    const call = y > picture.floor && findCall(picture, x);
    if (call) return `${momentText(picture, call.at)}\n${callText(call, picture.gpu.ordinals.get(picture.process))}`;
  }
  const column = Math.floor(x - MARGIN);
  return column >= 0 && column < picture.count ? describeColumn(picture, column) : null;
}
