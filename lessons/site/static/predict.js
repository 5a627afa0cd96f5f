// A lesson's outputs stay hidden until the reader has predicted (site.css hides them if scripts
// run). The names come from the cell `predict(name=..., ...)`, the measurements from what the last
// cell, `compare()`, printed, and the ranges from conf.py.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const cells = [...document.querySelectorAll("div.cell")];
  const code = (cell) => cell.querySelector(".cell_input")?.textContent.trim() ?? "";
  const output = (cell) => cell.querySelector(".cell_output");
  const asking = cells.findIndex((cell) => code(cell).startsWith("predict("));
  const hidden = cells.slice(asking + 1).filter(output);
  const last = hidden.at(-1);
  if (asking < 0 || !last || code(last) !== "compare()") {
    cells.filter(output).forEach((cell) => output(cell).classList.add("shown"));
    return;
  }
  cells.slice(0, asking).filter(output).forEach((cell) => output(cell).classList.add("shown"));
  const names = [...code(cells[asking]).matchAll(/(\w+)=/g)].map((match) => match[1]);
  const ranges = JSON.parse(document.getElementById("ranges").textContent);
  const printed = output(last).textContent, compared = [...output(last).childNodes];
  const measured = (name) => printed.match(`${spaced(name)} +measured (\\S+);`)[1];
  const store = `predictions of ${location.pathname}`;

  const form = element("form", { className: "prediction", id: "prediction", noValidate: true });
  form.append(element("p", { textContent: "Predict first. The outputs below are hidden until then." }));
  const fields = names.map((name) => {
    const field = element("input", { name, type: "text", inputMode: "decimal", autocomplete: "off" });
    const fault = element("span", { className: "fault" });
    fault.setAttribute("role", "alert");
    const label = element("label", { textContent: spaced(name) });
    label.append(field, fault);
    form.append(label);
    return { name, field, fault };
  });
  const button = element("button", { textContent: "Show the outputs" });
  const skip = element("button", { type: "button", className: "skip", textContent: "Show them without predicting" });
  const again = element("button", { type: "button", className: "again", textContent: "Hide them and predict again" });
  form.append(button, skip, again);
  output(cells[asking]).replaceWith(form);

  hidden.forEach((cell) => {
    const note = element("p", { className: "withheld", textContent: "Hidden until you have " });
    note.append(element("a", { href: "#prediction", textContent: "predicted" }), ".");
    output(cell).before(note);
  });

  function reveal(predicted) { // null: there are none
    document.documentElement.classList.add("predicted");
    hidden.forEach((cell) => output(cell).classList.add("shown"));
    document.querySelectorAll(".comparison").forEach((old) => old.remove());
    output(last).replaceChildren(...(predicted ? [comparison(names, predicted)] : compared));
    for (const cell of predicted ? hidden.slice(0, -1) : []) {
      const here = names.filter((name) => measures(code(cell), name));
      if (here.length) output(cell).append(comparison(here, predicted));
    }
  }

  function comparison(of, predicted) {
    const table = element("table", { className: "comparison" });
    const row = (kind, texts) => table.insertRow().append(
      ...texts.map((textContent) => element(kind, { textContent })));
    row("th", ["", "you said", "measured", "ratio"]);
    for (const name of of) {
      const value = measured(name), ratio = number(predicted[name]) / Number(value);
      const rounded = Number.isFinite(ratio) ? ratio.toFixed(2) : "–";
      row("td", [spaced(name), predicted[name], value, rounded]);
    }
    return table;
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    for (const { name, field, fault } of fields) fault.textContent = wrong(field.value, ranges[name]);
    const first = fields.find(({ fault }) => fault.textContent);
    if (first) return first.field.focus();
    const predicted = Object.fromEntries(fields.map(({ name, field }) => [name, field.value.trim()]));
    reveal(predicted);
    localStorage.setItem(store, JSON.stringify(predicted));
  });
  skip.addEventListener("click", () => reveal(null));
  again.addEventListener("click", () => {
    localStorage.removeItem(store);
    document.documentElement.classList.remove("predicted");
    hidden.forEach((cell) => output(cell).classList.remove("shown"));
    fields[0].field.focus();
  });

  const kept = JSON.parse(localStorage.getItem(store));
  if (kept) {
    for (const { name, field } of fields) field.value = kept[name];
    reveal(kept);
  }
});

function element(kind, properties) {
  return Object.assign(document.createElement(kind), properties);
}

function spaced(name) {
  return name.replaceAll("_", " ");
}

// As form.py reads a prediction: 0.5, 50%, 10 or 10x.
function number(text) {
  const bare = text.trim().replace(/[%x×]$/, "").trim();
  return bare === "" ? NaN : Number(bare) / (text.trim().endsWith("%") ? 100 : 1);
}

function wrong(text, [low, high]) {
  const value = number(text);
  if (!Number.isFinite(value)) return "write a number, as 0.5, 50%, 10 or 10x";
  return value < low || value > high ? `not between ${low} and ${high}` : "";
}

// Whether a cell's code calls measured(name=…), or measured(**{f"na{…}": …}).
function measures(code, name) {
  const call = code.match(/\bmeasured\([^]*/)?.[0] ?? "";
  return new RegExp(`\\b${name}=`).test(call)
    || [...call.matchAll(/f"(\w+)\{/g)].some((match) => name.startsWith(match[1]));
}

// A gallery page that a lesson links to can be stepped through below the link.
document.addEventListener("DOMContentLoaded", () => {
  for (const link of document.querySelectorAll("p a[href^='gallery/']")) {
    link.closest("p").after(element("iframe", {
      className: "run", loading: "lazy", src: link.href, title: "a run, pass by pass",
    }));
  }
});
