
"use strict";
// Reads values off the drawn curves: the page stores each point once.
const plots = [...document.querySelectorAll("figure")].map((figure) => {
  const svg = figure.querySelector("svg");
  const [x0, x1, y0, y1, left, right, bottom, top] = svg.dataset.scales.split(" ").map(Number);
  const curves = [...svg.querySelectorAll("path[data-label]")].map((path) => ({
    label: path.dataset.label,
    points: path.getAttribute("d").slice(1).split("L").map((place) => place.split(" ").map(Number)),
  }));
  return { figure, svg, curves, x0, x1, y0, y1, left, right, bottom, top };
});
const shown = (value) => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : value.toPrecision(3));
const place = (plot, step) => plot.left + ((step - plot.x0) / (plot.x1 - plot.x0)) * (plot.right - plot.left);

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
}

let current = null;
function show(step) {
  current = step;
  for (const plot of plots) {
    const x = place(plot, step), cursor = plot.svg.querySelector(".cursor"), out = plot.figure.querySelector(".reading");
    const inside = x >= plot.left && x <= plot.right;
    for (const name of ["x1", "x2"]) cursor.setAttribute(name, inside ? x : -9);
    if (!inside) { out.textContent = ""; continue; }
    const values = plot.curves.map(({ label, points }) => {
      const y = nearest(points, x)[1];
      return `${label} ${shown(plot.y0 + ((y - plot.bottom) / (plot.top - plot.bottom)) * (plot.y1 - plot.y0))}`;
    });
    out.textContent = `step ${step.toLocaleString("en")}: ${values.join(", ")}`;
  }
}

for (const plot of plots) {
  plot.svg.addEventListener("pointermove", (event) => {
    const box = plot.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * plot.svg.viewBox.baseVal.width;
    const share = Math.min(1, Math.max(0, (x - plot.left) / (plot.right - plot.left)));
    show(Math.round(plot.x0 + share * (plot.x1 - plot.x0)));
  });
  plot.figure.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by === undefined || event.target !== plot.figure) return;
    event.preventDefault();
    // A screen reader announces the plot with the focus only.
    for (const each of plots) {
      each.figure.querySelector(".reading").ariaLive = each === plot ? "polite" : "off";
    }
    const stride = Math.max(1, Math.round((plot.x1 - plot.x0) / 200)) * (event.shiftKey ? 10 : 1);
    show(Math.min(plot.x1, Math.max(plot.x0, (current === null ? plot.x1 : current) + by * stride)));
  });
}

const reload = Number(document.documentElement.dataset.reload || 0);
if (reload) setInterval(() => document.getElementById("follow").checked && location.reload(), reload * 1000);
