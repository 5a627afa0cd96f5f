// Runs Python for exercise.js, off the page's thread: Pyodide, and the lessons' own files.
import { loadPyodide } from "./python/pyodide.mjs";

const ready = (async () => {
  const [python, lessons] = await Promise.all([
    loadPyodide(), fetch(new URL("python/lessons.zip", import.meta.url)),
  ]);
  python.unpackArchive(await lessons.arrayBuffer(), "zip", { extractDir: "/lessons" });
  python.runPython("import sys; sys.path.append('/lessons')");
  return python.pyimport("judge");
})();
ready.catch((error) => setTimeout(() => { throw error; })); // reaches onerror

self.onmessage = async ({ data }) => {
  const { judge } = await ready;
  self.postMessage("started");
  self.postMessage(JSON.parse(judge(...data)));
};
