"use strict";
// Values under the pointer, curves and runs that are switched off, the slider, and refreshing.
// The page is read without all of it: every curve and every picture is in the HTML.

const off = new Set(); // what is switched off, by name: it stays off when the page is refreshed
const read = new WeakMap(); // curve -> its values

const all = (root, selector) => [...root.querySelectorAll(selector)];
const names = element => [`run ${element.dataset.run}`, `curve ${element.dataset.key}`];
const isOff = element => names(element).some(name => off.has(name));

function show() {
  const legend = document.querySelector(".runs"); // which lies over the upper end of the window
  document.documentElement.style.scrollPaddingTop = legend ? `${legend.offsetHeight}px` : "";
  for (const element of all(document, ".curve, .frames")) element.classList.toggle("off", isOff(element));
  for (const button of all(document, ".legend button")) button.setAttribute("aria-pressed", String(!isOff(button)));
}

function press(button) {
  const [run, curve] = names(button);
  const name = button.dataset.key === undefined || off.has(run) ? run : curve;
  if (!off.delete(name)) off.add(name);
  show();
}

// [[step, mean] or [step, mean, lowest, highest], ...]
function values(curve) {
  if (!read.has(curve)) read.set(curve, curve.dataset.values.split(";").map(one => one.split(" ").map(Number)));
  return read.get(curve);
}

function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - step) <= Math.abs(points[high][0] - step) ? points[low] : points[high];
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e15 || (size > 0 && size < 1e-4)) return value.toExponential(2);
  return size >= 1e4 ? value.toLocaleString("en", {notation: "compact", maximumSignificantDigits: 4}) : String(value);
}

const said = ([, mean, low, high]) => low === undefined ? short(mean) : `${short(mean)} (${short(low)} to ${short(high)})`;

// The share of the chart's width -> the values there in the legend, and the step in the caption.
function hover(figure, share) {
  const [width, left, right, last] = figure.dataset.across.split(" ").map(Number);
  const step = Math.min(Math.max((share * width - left) / (right - left), 0), 1) * last;
  const curves = all(figure, ".curve").filter(curve => !isOff(curve));
  if (!curves.length) return;
  const snapped = curves.map(curve => nearest(values(curve), step)[0])
    .reduce((best, one) => Math.abs(one - step) < Math.abs(best - step) ? one : best);
  for (const button of all(figure, ".legend button")) {
    const curve = curves.find(one => one.dataset.key === button.dataset.key), number = button.querySelector("b");
    if (number.dataset.newest === undefined) number.dataset.newest = number.textContent;
    const point = curve && nearest(values(curve), snapped);
    // A run that ended before has no value here.
    number.textContent = point && Math.abs(point[0] - snapped) <= last / 20 ? said(point) : "-";
  }
  figure.querySelector("output").textContent = `step ${snapped.toLocaleString("en")}`;
  figure.querySelector("svg").classList.add("hovered");
  figure.querySelector(".cursor").setAttribute("transform", `translate(${left + snapped / last * (right - left)} 0)`);
}

function leave(figure) {
  for (const number of all(figure, ".legend b")) {
    if (number.dataset.newest !== undefined) number.textContent = number.dataset.newest;
  }
  figure.querySelector("output").textContent = "";
  figure.querySelector("svg").classList.remove("hovered");
}

function slide(slider) {
  const step = Number(slider.dataset.steps.split(" ")[slider.value]);
  for (const run of all(slider.closest(".slider"), ".frames")) {
    const frames = all(run, ".frame"), before = frames.filter(frame => Number(frame.dataset.step) <= step);
    const shown = before.length ? before[before.length - 1] : frames[0];
    for (const frame of frames) frame.hidden = frame !== shown;
    run.querySelector("output").textContent = Number(shown.dataset.step).toLocaleString("en");
  }
}

// A new page keeps what is open, switched off and chosen; a slider at its end stays at the end.
function replaceMain(next) {
  const main = document.querySelector("main"), sliders = all(main, ".slider input");
  const chosen = sliders.filter(one => Number(one.value) < Number(one.max)).map(one => one.dataset.steps.split(" ")[one.value]);
  const open = new Set(all(main, "details[open] summary").map(one => one.textContent));
  main.replaceWith(next);
  for (const one of all(next, "summary")) one.closest("details").open = open.has(one.textContent);
  all(next, ".slider input").forEach((one, index) => {
    one.hidden = false;
    const place = one.dataset.steps.split(" ").indexOf(chosen[index]);
    if (place >= 0) one.value = place;
    slide(one);
  });
  show();
}

async function refresh(state) {
  const tell = text => Object.assign(document.querySelector("#live"), {textContent: text, hidden: false});
  try {
    const answer = await fetch("", {cache: "no-store", headers: state.tag ? {"If-None-Match": state.tag} : {}});
    if (answer.status === 200) {
      state.tag = answer.headers.get("ETag");
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      replaceMain(page.querySelector("main"));
    } else if (answer.status !== 304) throw new Error();
    if (answer.status === 200 || state.lost) tell(`as of ${new Date().toLocaleTimeString()}`);
    state.lost = false;
  } catch {
    state.lost = true;
    tell("the server of this page does not answer: it shows what there was");
  }
}

const within = (event, selector) => event.target.closest ? event.target.closest(selector) : null;
document.addEventListener("click", event => {
  const button = within(event, ".legend button");
  if (button) press(button);
});
document.addEventListener("input", event => { if (within(event, ".slider input")) slide(event.target); });
let hovered = null;
document.addEventListener("pointermove", event => {
  const svg = within(event, ".chart[data-across] svg"), figure = svg && svg.closest("figure");
  if (hovered && hovered !== figure) leave(hovered);
  hovered = figure;
  if (!figure) return;
  const box = svg.getBoundingClientRect();
  hover(figure, (event.clientX - box.left) / box.width);
});
for (const slider of all(document, ".slider input")) slider.hidden = false;
addEventListener("resize", show);
show();
const seconds = Number(document.documentElement.dataset.refresh);
if (seconds) {
  const state = {};
  setInterval(() => refresh(state), 1000 * seconds);
}
