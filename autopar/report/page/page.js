"use strict";
const readout = document.getElementById("readout");
const inner = document.querySelector(".gantt-inner");
const buttons = document.querySelectorAll("[data-zoom]");
for (const button of buttons) {
  button.addEventListener("click", () => {
    const box = inner.parentElement;
    const middle = (box.scrollLeft + box.clientWidth / 2) / box.scrollWidth;
    inner.className = "gantt-inner zoom-" + button.dataset.zoom;
    for (const each of buttons) each.setAttribute("aria-pressed", String(each === button));
    box.scrollLeft = middle * box.scrollWidth - box.clientWidth / 2;
  });
}
for (const lane of document.querySelectorAll("svg[data-lane]")) {
  const actions = [...lane.querySelectorAll("rect[data-a]")];
  const bins = lane.querySelector("[data-busy]");
  const busy = bins ? bins.dataset.busy.split(",") : null;
  let at = -1;
  let bin = 0;
  const say = (text) => { readout.textContent = text; };
  const mark = (rect) => {
    for (const old of document.querySelectorAll("rect.on")) old.classList.remove("on");
    if (!rect) return;
    rect.classList.add("on");
    say("group " + lane.getAttribute("aria-label").split(",")[0].slice(6) + ": " + rect.dataset.a + (rect.dataset.t ? ", " + rect.dataset.t : ""));
  };
  const show = (k) => say(lane.dataset.lane.split(":")[0] + ": " + (100 * k / busy.length).toFixed(0) + "% into the step, " + busy[k] + "% of the time busy");
  lane.addEventListener("focus", () => say(lane.dataset.lane));
  lane.addEventListener("pointermove", (event) => {
    if (event.target.dataset && event.target.dataset.a) {
      at = actions.indexOf(event.target);
      mark(event.target);
    } else if (busy) {
      const box = lane.getBoundingClientRect();
      bin = Math.max(0, Math.min(busy.length - 1, Math.floor(busy.length * (event.clientX - box.left) / box.width)));
      show(bin);
    } else {
      mark(null);
      say(lane.dataset.lane);
    }
  });
  lane.addEventListener("keydown", (event) => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!step) return;
    event.preventDefault();
    if (busy) {
      bin = Math.max(0, Math.min(busy.length - 1, bin + step * Math.ceil(busy.length / 96)));
      show(bin);
    } else if (actions.length) {
      at = Math.max(0, Math.min(actions.length - 1, at + step));
      mark(actions[at]);
      actions[at].scrollIntoView({block: "nearest", inline: "nearest"});
    }
  });
}
for (const pick of document.querySelectorAll(".pick")) {
  const dots = [...pick.querySelectorAll(".dot")];
  const rows = [...pick.parentElement.querySelectorAll(`[aria-label^="${pick.dataset.pick},"] tbody tr`)];
  const choose = (k) => {
    for (const dot of dots) dot.classList.toggle("picked", dot.dataset.k === k);
    for (const facts of pick.querySelectorAll(".facts > div")) facts.hidden = facts.id !== pick.dataset.pick + "-" + k;
    rows.forEach((row, at) => row.classList.toggle("picked", String(at) === k));
  };
  for (const dot of dots) {
    dot.addEventListener("click", () => choose(dot.dataset.k));
    dot.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      choose(dot.dataset.k);
    });
  }
  rows.forEach((row, at) => row.addEventListener("click", () => choose(String(at))));
}
const open = (value) => { for (const block of document.querySelectorAll("details.block")) block.open = value; };
document.getElementById("open-all").addEventListener("click", () => open(true));
document.getElementById("close-all").addEventListener("click", () => open(false));
