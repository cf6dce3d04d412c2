// A pad of grey pixels to draw on, with a pointer or with keys.
import {make} from "/ui/draw.js";

// Calls `changed` with the values of the pixels from 0 to 1, row by row.
export function pad(name, [height, width], changed) {
  const pixels = new Float32Array(height * width);
  const canvas = make("canvas", {width, height, tabindex: 0, role: "img",
    "aria-label": `draw ${name}: with a pointer, or with the arrow keys and the space bar`});
  const context = canvas.getContext("2d"), cursor = {row: height >> 1, column: width >> 1, shown: false};
  const paint = () => {
    const shown = context.createImageData(width, height);
    pixels.forEach((value, index) => shown.data.set([value * 255, value * 255, value * 255, 255], 4 * index));
    if (cursor.shown) shown.data.set([90, 130, 255, 255], 4 * (cursor.row * width + cursor.column));
    context.putImageData(shown, 0, 0);
    changed(pixels);
  };
  // Ink falls off with the distance, as a pen's does on a scan.
  const ink = (x, y) => {
    const reach = Math.max(0.9, width / 14);
    for (let row = 0; row < height; row++) {
      for (let column = 0; column < width; column++) {
        const distance = Math.hypot(column + 0.5 - x, row + 0.5 - y) / reach, index = row * width + column;
        pixels[index] = Math.min(1, Math.max(pixels[index], 1.15 - distance));
      }
    }
    paint();
  };
  const move = (event) => {
    if (!event.buttons) return;
    const box = canvas.getBoundingClientRect();
    ink((event.clientX - box.left) * width / box.width, (event.clientY - box.top) * height / box.height);
  };
  canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); move(event); });
  canvas.addEventListener("pointermove", move);
  const steps = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in steps) && event.key !== " ") return;
    event.preventDefault();
    const [down, right] = steps[event.key] ?? [0, 0];
    cursor.row = (cursor.row + down + height) % height;
    cursor.column = (cursor.column + right + width) % width;
    if (event.key === " ") ink(cursor.column + 0.5, cursor.row + 0.5); else paint();
  });
  for (const [event, shown] of [["focus", true], ["blur", false]]) {
    canvas.addEventListener(event, () => { cursor.shown = shown && canvas.matches(":focus-visible"); paint(); });
  }
  const clear = make("button", {class: "plain", type: "button"}, "clear");
  clear.addEventListener("click", () => { pixels.fill(0); paint(); });
  paint();
  return make("div", {}, canvas, clear);
}

