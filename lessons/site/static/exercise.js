// Exercises that need no torch are written and judged on the page. Python runs in the browser, and
// is loaded when the reader first asks for a verdict. The browser keeps the answers. Below the
// others, a line says where they are judged.
"use strict";

const ELSEWHERE = "Answers are judged in the notebook: this page has no PyTorch.";
const PATIENCE = 60; // seconds; an answer that only computes is stopped by form.py, earlier

document.addEventListener("DOMContentLoaded", () => {
  const imports = []; // of the cells above
  for (const cell of cells()) {
    const [, stub, name] = code(cell).match(/^([^]*?)\s+(\w+) = check\(\2\)$/) ?? [];
    const task = name && lesson().exercises[name];
    if (task) {
      input(cell).replaceWith(exercise(name, `${stub}\n`, { ...task, imports: [...imports] }));
      output(cell).remove();
    } else if (name && lesson().elsewhere.includes(name)) {
      output(cell).replaceWith(element("p", { className: "elsewhere", textContent: ELSEWHERE }));
    } else {
      imports.push(...code(cell).match(/^(from|import) .*/gm) ?? []);
    }
  }
});

function exercise(name, stub, { number, hints, solution, source, imports }) {
  const editor = element("textarea", {
    value: kept("code")[name] ?? stub, spellcheck: false, autocapitalize: "off", ariaLabel: name,
  });
  const verdict = element("pre", { className: "verdict" }), help = element("div", { className: "help" });
  verdict.setAttribute("role", "status");
  const form = element("form", { className: "exercise" }, editor,
    button("go", "Check", "submit"), button("hint", "Hint"), button("solution", "Solution"),
    button("again", "Start again"),
    element("p", { className: "note", textContent: "Python runs in your browser: the first check loads it (13 MB)." }),
    verdict, help);
  const onClick = (kind, act) => form.querySelector(kind).addEventListener("click", act);
  const fit = () => { editor.rows = editor.value.split("\n").length + 1; };
  const show = ({ right, text }) => {
    verdict.textContent = text;
    verdict.classList.toggle("right", right);
    if (right) showSource(name, source);
  };
  const edited = () => {
    fit();
    show({ right: false, text: "" });
    keep("code", { ...kept("code"), [name]: editor.value });
    keep("verdicts", { ...kept("verdicts"), [name]: undefined });
  };
  fit();
  show(kept("verdicts")[name] ?? { right: false, text: "" });
  editor.addEventListener("input", edited);
  editor.addEventListener("keydown", indent);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const check = form.querySelector(".go");
    check.disabled = true;
    show({ right: false, text: "Python is running …" });
    const found = await judged(number, name, imports.join("\n"), editor.value);
    show(found);
    keep("verdicts", { ...kept("verdicts"), [name]: found });
    check.disabled = false;
  });
  onClick(".hint", () => {
    const n = help.querySelectorAll("p").length;
    help.append(...hints.slice(n, n + 1).map((hint) => element("p", {}, ...marked(`${n + 1}. ${hint}`))));
    form.querySelector(".hint").disabled = n + 1 >= hints.length;
  });
  onClick(".solution", () => {
    if (!help.querySelector("pre")) help.append(element("div", { innerHTML: solution }));
  });
  onClick(".again", () => {
    editor.value = stub;
    edited();
    help.replaceChildren();
    form.querySelector(".hint").disabled = false;
  });
  return form;
}

// As in the notebook, what the package does is shown once the answer is right.
function showSource(name, source) {
  const cell = cells().find((cell) => new RegExp(`^source\\(${name}\\)$`, "m").test(code(cell)));
  if (cell) output(cell).replaceChildren(element("div", { innerHTML: source }));
}

// Enter continues the line's indentation, by four more after a colon. Tab indents; Escape and then
// Tab leaves the field.
function indent(event) {
  const editor = event.target, before = editor.value.slice(0, editor.selectionStart);
  const line = before.slice(before.lastIndexOf("\n") + 1);
  const inserted = {
    Enter: `\n${line.match(/^ */)[0]}${/:\s*$/.test(line) ? "    " : ""}`,
    Tab: event.shiftKey || editor.leaving ? undefined : "    ",
  }[event.key];
  editor.leaving = event.key === "Escape";
  if (inserted === undefined) return;
  event.preventDefault();
  document.execCommand("insertText", false, inserted); // undo works
}

// ---- Python -------------------------------------------------------------------------------------

const here = document.currentScript.src;
let worker = null, last = Promise.resolve();

function judged(...answer) { return last = last.then(() => ask(answer)); } // one at a time

// The verdict of form.py: whether an answer is right, and what there is to say.
function ask(answer) {
  if (location.protocol === "file:") {
    return { right: false, text: "a browser starts Python only on a page from a server: run\n"
      + "python3 -m http.server -d build/site, and open http://localhost:8000" };
  }
  worker ??= new Worker(new URL("python.js", here), { type: "module" });
  return new Promise((resolve) => {
    let timer = null;
    const stop = (text) => {
      worker.terminate();
      worker = null;
      resolve({ right: false, text });
    };
    worker.onerror = () => stop("Python could not be loaded; reload the page to try again");
    worker.onmessage = ({ data }) => {
      if (data === "started") {
        timer = setTimeout(stop, 1000 * PATIENCE,
          `${answer[1]}: it is still running after ${PATIENCE} seconds; does it end?`);
      } else {
        clearTimeout(timer);
        resolve(data);
      }
    };
    worker.postMessage(answer);
  });
}
