// Lines over prompt lengths, as SVG elements.
import { tick } from "/words.js";

const HEIGHT = 260;
const EDGE = { left: 58, right: 14, top: 12, bottom: 42 };

function shape(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

function ticks(most, parts) {
  const step = tick(most, parts);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
}

function marker(series, x, y) {
  const attributes = { class: `mark series-${series}` };
  return series
    ? shape("rect", { ...attributes, x: x - 4, y: y - 4, width: 8, height: 8 })
    : shape("circle", { ...attributes, cx: x, cy: y, r: 4.5 });
}

// Draw `series`, each a list of {x, y}, from (0, 0) on, `width` pixels wide.
export function draw(svg, width, series, xLabel, yLabel) {
  const all = series.flat();
  const xMost = Math.max(...all.map((point) => point.x));
  const yMost = 1.05 * Math.max(...all.map((point) => point.y));
  const right = width - EDGE.right;
  const bottom = HEIGHT - EDGE.bottom;
  const x = (value) => EDGE.left + (value / xMost) * (right - EDGE.left);
  const y = (value) => bottom - (value / yMost) * (bottom - EDGE.top);
  const parts = [];
  for (const value of ticks(yMost, 5)) {
    parts.push(shape("line", { class: "grid", x1: EDGE.left, x2: right, y1: y(value), y2: y(value) }));
    const label = value.toLocaleString("en");
    parts.push(shape("text", { class: "end", x: EDGE.left - 8, y: y(value) + 4 }, label));
  }
  for (const value of ticks(xMost, width < 500 ? 4 : 8)) {
    parts.push(shape("text", { class: "middle", x: x(value), y: bottom + 18 }, value.toLocaleString("en")));
  }
  parts.push(shape("text", { class: "middle", x: (EDGE.left + right) / 2, y: HEIGHT - 6 }, xLabel));
  const turned = { class: "middle", transform: `translate(14 ${(EDGE.top + bottom) / 2}) rotate(-90)` };
  parts.push(shape("text", turned, yLabel));
  series.forEach((points, i) => {
    const line = points.map((point) => `${x(point.x)},${y(point.y)}`).join(" ");
    parts.push(shape("polyline", { class: `line series-${i}`, points: line }));
    parts.push(...points.map((point) => marker(i, x(point.x), y(point.y))));
  });
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.setAttribute("height", HEIGHT);
  svg.replaceChildren(...parts);
}
