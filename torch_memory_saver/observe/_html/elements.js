"use strict";
// The begin of every page's script: its data, elements, colours, and canvases. Text of the data is only ever set as
// textContent.

const data = JSON.parse(document.getElementById("data").textContent);

// ---- Text and elements

function make(name, text, className) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function byId(name) {
  return document.getElementById(name);
}

function plural(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

function legendEntry(className, text) {
  const entry = make("li");
  entry.append(make("span", undefined, `swatch ${className}`), text);
  return entry;
}

// A line does not end before a number: "device 0" stays whole.
function keepNumbers(text) {
  return text.replaceAll(/ (?=\d)/g, "\u00a0");
}

// ---- Colours

let palette;

// The variables of the style sheet; to be read again when the colour scheme changes.
function readPalette() {
  const style = getComputedStyle(document.documentElement);
  palette = Object.fromEntries(PALETTE.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
}

function onColourScheme(redraw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readPalette();
    redraw();
  });
}

// ---- Canvases

function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.parentElement.clientWidth;
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  return { context, width, height };
}

function hatching(context) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = palette.hatch;
  pen.beginPath();
  for (const shift of [-6, 0, 6]) {
    pen.moveTo(shift, 6);
    pen.lineTo(shift + 6, 0);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

function tell(text, x, y) {
  const tip = byId("tooltip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = Math.max(4, y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
}
