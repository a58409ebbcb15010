// Adds to charts that stand in the page already: a cursor that reads values, by mouse, touch or arrow keys.
// Without it nothing is missing but that; a table under each chart has values too.
"use strict";
(() => {
  const box = JSON.parse(document.getElementById("box").textContent); // [left, right, top, bottom] of a drawing
  const data = JSON.parse(document.getElementById("data").textContent);
  const names = [...document.querySelectorAll("[data-name]")].map((each) => each.textContent);

  const nearest = (steps, step) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle; else high = middle;
    }
    return Math.abs(steps[high] - step) < Math.abs(steps[low] - step) ? high : low;
  };
  const shown = (value) => {
    const size = Math.abs(value);
    if (size >= 1e9 || (size > 0 && size < 1e-3)) return value.toExponential(3);
    return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(5)));
  };

  for (const [slug, chart] of Object.entries(data)) {
    const svg = document.querySelector(`#chart-${slug} svg`);
    const readout = document.querySelector(`#chart-${slug} .readout`);
    const runs = chart.runs.map(([run, deltas, values]) => {
      let step = 0;
      return { run, values, steps: deltas.map((delta) => (step += delta)) };
    });
    const all = [...new Set(runs.flatMap((run) => run.steps))].sort((a, b) => a - b);
    const [low, high] = chart.x;
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
    cursor.setAttribute("class", "cursor");
    svg.append(cursor);
    svg.tabIndex = 0;
    svg.setAttribute("aria-keyshortcuts", "ArrowLeft ArrowRight PageUp PageDown Home End");
    let at = all.length - 1;

    const show = () => {
      const x = box[0] + ((all[at] - low) / (high - low)) * (box[1] - box[0]);
      cursor.setAttribute("d", `M${x.toFixed(1)} ${box[2]}V${box[3]}`);
      readout.replaceChildren(`step ${all[at].toLocaleString("en")}`);
      // Beside the cursor, on the side where there is more room.
      const place = (100 * x) / svg.viewBox.baseVal.width, isLeft = place > 50;
      readout.style.left = isLeft ? "auto" : `calc(${place}% + 6px)`;
      readout.style.right = isLeft ? `calc(${100 - place}% + 6px)` : "auto";
      for (const { run, steps, values } of runs) {
        const toggle = document.getElementById(`show-${run}`);
        if ((toggle && !toggle.checked) || !steps.length) continue;
        const near = nearest(steps, all[at]);
        const value = document.createElement("b");
        value.textContent = shown(values[near]) + chart.unit;
        const line = document.createElement("div");
        if (names.length > 1) {
          const swatch = document.querySelector(`label[for="show-${run}"] svg`);
          line.append(swatch.cloneNode(true), ` ${names[run]} `);
        }
        line.append(steps[near] === all[at] ? "" : ` step ${steps[near].toLocaleString("en")} `, value);
        readout.append(line);
      }
    };
    const hide = () => { cursor.removeAttribute("d"); readout.replaceChildren(); };
    const point = (event) => {
      const bounds = svg.getBoundingClientRect();
      const x = ((event.clientX - bounds.left) / bounds.width) * svg.viewBox.baseVal.width;
      at = nearest(all, low + ((x - box[0]) / (box[1] - box[0])) * (high - low));
      show();
    };
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", () => { if (document.activeElement !== svg) hide(); });
    svg.addEventListener("focus", show);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const far = Math.max(1, Math.round(all.length / 20));
      const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -far, PageDown: far, Home: -all.length, End: all.length };
      if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      at = Math.min(all.length - 1, Math.max(0, at + moves[event.key] * (event.shiftKey ? far : 1)));
      show();
    });
  }
})();
