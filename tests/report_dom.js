// A page's elements, as far as dit/report/page.js uses them; run by Node before that script.
// One chart of two runs, `a` until step 100 and `b` until step 40, and a slider over their steps.
class El {
  constructor(data, classes, children = {}) {
    Object.assign(this, {dataset: data, classes: new Set(classes), children, attributes: {}, textContent: "", hidden: false});
    this.classList = {toggle: (c, on) => (on ? this.classes.add(c) : this.classes.delete(c)), add: c => this.classes.add(c), remove: c => this.classes.delete(c)};
  }
  setAttribute(name, value) { this.attributes[name] = value; }
  querySelectorAll(selector) { return this.children[selector] || []; }
  querySelector(selector) { return this.querySelectorAll(selector)[0]; }
  closest(selector) { return this.parents && this.parents[selector]; }
}
const entry = run => {
  const shown = new El({}, []);
  shown.textContent = "newest";
  return new El({run, key: `loss/${run}`}, [], {b: [shown]});
};
const curve = (run, values) => new El({run, key: `loss/${run}`, values}, ["curve"]);
const curves = [curve("a", "10 1;50 2 1 9;100 3"), curve("b", "10 5;40 6")];
const buttons = ["a", "b"].map(entry), runs = ["a", "b"].map(run => new El({run}, []));
const output = new El({}, []), svg = new El({}, []), cursor = new El({}, []);
const figure = new El({across: "420 50 408 100"}, [], {
  ".curve": curves, ".legend button": buttons, ".legend b": buttons.map(one => one.querySelector("b")),
  output: [output], svg: [svg], ".cursor": [cursor],
});
const frames = (run, steps) => new El({run}, [], {".frame": steps.map(step => new El({step: String(step)}, [])), output: [new El({}, [])]});
const columns = [frames("a", [20, 60, 100]), frames("b", [30, 60])];
const range = new El({steps: "20 30 60 100"}, []);
range.parents = {".slider": new El({}, [], {".frames": columns})};
const handlers = {};
globalThis.addEventListener = () => {};
globalThis.document = {
  documentElement: {dataset: {refresh: "0"}, style: {}},
  querySelector: () => null,
  addEventListener: (name, handler) => { handlers[name] = handler; },
  querySelectorAll: selector => ({
    ".curve, .frames": [...curves, ...columns], ".legend button": [...runs, ...buttons], ".slider input": [range],
  })[selector],
};

// What the script then does, printed as JSON.
globalThis.act = (press, hover, leave, slide) => {
  const legend = () => buttons.map(one => one.querySelector("b").textContent);
  const drawn = () => [...curves, ...columns].map(one => !one.classes.has("off"));
  const at = step => { hover(figure, (50 + step / 100 * 358) / 420); return [output.textContent, ...legend()]; };
  const slid = place => { range.value = place; slide(range); return columns.map(one => one.querySelectorAll(".frame").filter(f => !f.hidden).map(f => f.dataset.step).join()); };
  const said = {hovered: [at(12), at(52), at(99)]};
  leave(figure);
  said.left = [output.textContent, ...legend()];
  said.drawn = [drawn()];
  for (const one of [runs[0], buttons[0], buttons[1], buttons[1]]) { press(one); said.drawn.push(drawn()); }
  said.pressed = (press(runs[1]), [...runs, ...buttons].map(one => one.attributes["aria-pressed"]));
  said.alone = at(12);
  said.slid = [0, 1, 2, 3].map(slid);
  said.slider = range.hidden;
  console.log(JSON.stringify(said));
};
