// A form for the tensors of a model: a drawing for small images, a picture, JSON, or a .npy file for each input.
import {make} from "/ui/draw.js";
import {pad} from "/ui/pad.js";

const KINDS = {f2: "FP16", f4: "FP32", f8: "FP64", i1: "INT8", i2: "INT16", i4: "INT32", i8: "INT64", u1: "UINT8", u2: "UINT16",
  u4: "UINT32", u8: "UINT64", b1: "BOOL"};
const LARGEST = 64; // pixels of a side that can be drawn
const MOST_SCORES = 64, BEST = 10; // of more values than this with names of classes, the largest are shown

export function tensorForm(metadata) {
  const inputs = metadata.inputs.map((spec) => field(spec)), tensors = () => inputs.map((input) => input.tensor());
  const body = () => {
    try {
      return JSON.stringify({inputs: tensors()});
    } catch (error) {
      throw new Error(`The values are not JSON: ${error.message}`);
    }
  };
  return {
    element: make("div", {}, ...inputs.map((input) => input.element)),
    request: () => ({body: body(), headers: {}}),
    fits: (other) => other.inputs.length === inputs.length && tensors().every(({name, datatype, shape}, index) => {
      const spec = other.inputs[index];
      return spec.name === name && spec.datatype === datatype && spec.shape.length === shape.length;
    }),
    curl: (url) => `curl -s '${url}' -H 'Content-Type: application/json' -d '${body().replaceAll("'", "'\\''")}'`,
    python: () => ({imports: [], inputs: (body(), tensors()).map(written)}),
    read: (answer) => answer.json(),
    draw: (content, {labels = []}) => content.outputs.map((each) => output(each, labels)),
  };
}

const LITERALS = {FP: "float", INT: "int", UINT: "uint"};

export function numpyType(datatype) {
  const [, kind, bits] = /^(FP|INT|UINT)(\d+)$/.exec(datatype) ?? [];
  return kind ? `np.${LITERALS[kind]}${bits}` : datatype === "BOOL" ? "bool" : "object";
}

// A tensor as an entry of a dictionary in Python.
function written({name, datatype, shape, data}) {
  const values = JSON.stringify(data), literal = datatype === "BYTES" ? values : values.replaceAll("true", "True").replaceAll("false", "False");
  return `    ${JSON.stringify(name)}: np.array(${literal}, ${numpyType(datatype)}).reshape(${JSON.stringify(shape)}),`;
}

// A tensor of one image in grey, as [height, width]; null if it is something else.
function image({datatype, shape}) {
  const sides = shape.filter((size, index) => size > 1 || (size === -1 && index > 0));
  if (!["FP32", "UINT8", "FP16", "FP64"].includes(datatype) || shape.length < 3 || sides.length !== 2) return null;
  return sides.every((size) => size >= 6 && size <= LARGEST) ? sides : null;
}

// How a picture becomes a tensor: its height and width (-1 for those of the picture), channels, and whether they come last.
function layout({datatype, shape}) {
  if (!["FP32", "UINT8", "FP16", "FP64"].includes(datatype) || ![3, 4].includes(shape.length)) return null;
  const [first, second, third] = shape.slice(-3);
  const last = third === 3 || third === 1, channels = last ? third : first;
  const [height, width] = last ? [first, second] : [second, third];
  return (channels === 3 || channels === 1) && [height, width].every((side) => side === -1 || side >= 6) ? {height, width, channels, last} : null;
}

async function pixels(file, {datatype}, {height, width, channels, last}) {
  const picture = await createImageBitmap(file).catch(() => { throw new Error("This is not a picture that the browser can show."); });
  const scale = Math.min(1, 1024 / Math.max(picture.width, picture.height));
  const rows = height === -1 ? Math.round(picture.height * scale) : height, columns = width === -1 ? Math.round(picture.width * scale) : width;
  const canvas = make("canvas", {width: columns, height: rows, role: "img", "aria-label": file.name}), context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0, columns, rows);
  const found = context.getImageData(0, 0, columns, rows).data, size = rows * columns, data = Array(size * channels);
  for (let place = 0; place < size; place++) {
    const colours = [...found.subarray(4 * place, 4 * place + 3)];
    const values = channels === 3 ? colours : [0.299 * colours[0] + 0.587 * colours[1] + 0.114 * colours[2]];
    values.forEach((value, channel) => {
      data[last ? place * channels + channel : channel * size + place] = datatype === "UINT8" ? Math.round(value) : Number((value / 255).toFixed(4));
    });
  }
  return {canvas, data, shape: last ? [1, rows, columns, channels] : [1, channels, rows, columns]};
}

function field(spec) {
  const shape = spec.shape.map((size) => (size === -1 ? 1 : size));
  const size = shape.reduce((product, side) => product * side, 1);
  const legend = make("legend", {}, `${spec.name} `, make("small", {}, `${spec.datatype} [${spec.shape.join(", ")}]`));
  const text = make("textarea", {"aria-label": `${spec.name} as JSON`, spellcheck: "false"});
  const empty = spec.datatype === "BYTES" ? "" : spec.datatype === "BOOL" ? false : 0;
  text.value = JSON.stringify(Array(Math.min(size, 4096)).fill(empty));
  const file = make("input", {type: "file", accept: ".npy", "aria-label": `${spec.name} from a .npy file`});
  let loaded = null;
  file.addEventListener("change", async () => {
    try {
      loaded = file.files.length ? read(await file.files[0].arrayBuffer()) : null;
      if (loaded) text.value = JSON.stringify(loaded.data);
      file.setCustomValidity("");
    } catch (error) {
      loaded = null;
      file.setCustomValidity(error.message);
      file.reportValidity();
    }
  });
  text.addEventListener("input", () => { loaded = null; });
  const sides = image(spec), known = sides ? null : layout(spec), shown = make("div");
  const element = make("fieldset", {}, legend);
  if (sides) element.append(pad(spec.name, sides, (drawn) => { loaded = null; text.value = JSON.stringify(values(drawn, spec.datatype)); }));
  if (known) {
    const photo = make("input", {type: "file", accept: "image/*", "aria-label": `${spec.name} from a picture`});
    photo.addEventListener("change", async () => {
      try {
        const found = photo.files.length ? await pixels(photo.files[0], spec, known) : null;
        if (!found) return;
        loaded = {...found, shape: found.shape.slice(-spec.shape.length)};
        text.value = JSON.stringify(found.data);
        shown.replaceChildren(found.canvas);
        photo.setCustomValidity("");
      } catch (error) {
        photo.setCustomValidity(error.message);
        photo.reportValidity();
      }
    });
    const range = spec.datatype === "UINT8" ? "0 to 255" : "0 to 1";
    element.append(make("p", {}, make("label", {}, "a picture ", photo)), shown,
      make("p", {class: "soft"}, `Its pixels become values from ${range}. For a model that expects others, send a .npy file.`));
  }
  element.append(sides || known || size > 256 ? make("details", {}, make("summary", {}, "values"), text) : text, make("p", {}, make("label", {class: "soft"}, "or a .npy file ", file)));
  return {element, tensor() {
    const data = JSON.parse(text.value), measured = loaded?.shape ?? dims(data);
    const shape = measured.length === spec.shape.length ? measured : fitted(spec.shape, count(data));
    return {name: spec.name, datatype: spec.datatype, shape, data};
  }};
}

const dims = (data) => (Array.isArray(data) ? [data.length, ...(Array.isArray(data[0]) ? dims(data[0]) : [])] : []);
const count = (data) => (Array.isArray(data) ? data.reduce((sum, each) => sum + count(each), 0) : 1);

// The shape of flat data: the first free dimension takes what the others leave.
function fitted(shape, size) {
  const fixed = shape.reduce((product, side) => (side === -1 ? product : product * side), 1);
  let free = true;
  return shape.map((side) => {
    if (side !== -1) return side;
    const found = free ? Math.max(1, Math.floor(size / fixed)) : 1;
    free = false;
    return found;
  });
}

// The values of drawn pixels in the range of a datatype.
function values(pixels, datatype) {
  const most = datatype === "UINT8" ? 255 : 1;
  return [...pixels].map((value) => Number((value * most).toFixed(most === 1 ? 4 : 0)));
}

// The .npy format: a magic number, a version, the length of a header in Python's syntax, the header, the values.
function read(buffer) {
  const view = new DataView(buffer), text = new TextDecoder("latin1");
  if (buffer.byteLength < 12 || text.decode(buffer.slice(1, 6)) !== "NUMPY") throw new Error("This is not a .npy file.");
  const long = view.getUint8(6) > 1, start = long ? 12 : 10, size = long ? view.getUint32(8, true) : view.getUint16(8, true);
  const header = text.decode(buffer.slice(start, start + size));
  const kind = /'descr': '[<|]([fiub]\d)'/.exec(header)?.[1], shape = /'shape': \(([^)]*)\)/.exec(header)?.[1];
  if (!KINDS[kind] || shape === undefined) throw new Error("Only numbers and truth values in little-endian order can be read.");
  if (/'fortran_order': True/.test(header)) throw new Error("Write the array in C order: numpy.ascontiguousarray.");
  if (kind === "f2") throw new Error("Write FP16 as float32; the server rounds it.");
  const Values = {f4: Float32Array, f8: Float64Array, i1: Int8Array, i2: Int16Array, i4: Int32Array, i8: BigInt64Array, u1: Uint8Array,
    u2: Uint16Array, u4: Uint32Array, u8: BigUint64Array, b1: Uint8Array}[kind];
  const values = [...new Values(buffer.slice(start + size))];
  const data = kind === "b1" ? values.map(Boolean) : values.map(Number);
  return {data, shape: shape.split(",").map((each) => each.trim()).filter(Boolean).map(Number)};
}

export function output({name, datatype, shape, data}, names) {
  const head = make("p", {}, `${name} `, make("small", {}, `${datatype} [${shape.join(", ")}]`));
  const numeric = /^(FP|BF|INT|UINT)/.test(datatype), row = shape.at(-1), named = names.length === row;
  if (!numeric || data.length < 2 || row < 2 || (row > MOST_SCORES && !named) || data.length !== row) {
    const text = data.length > 256 ? `${JSON.stringify(data.slice(0, 256)).slice(0, -1)}, ... ${data.length} values` : JSON.stringify(data);
    return make("div", {}, head, make("code", {}, text));
  }
  const low = Math.min(...data), high = Math.max(...data), top = data.indexOf(high), list = make("div", {class: "scores"});
  const called = (index) => (named ? names[index] : String(index));
  const shown = row > MOST_SCORES ? [...data.keys()].sort((one, other) => data[other] - data[one]).slice(0, BEST) : [...data.keys()];
  shown.forEach((index) => {
    const value = data[index], bar = make("b");
    bar.style.width = `${high > low ? 100 * (value - low) / (high - low) : 0}%`;
    list.append(make("span", {}, called(index)), make("div", index === top ? {class: "top"} : {}, bar), make("span", {}, value.toPrecision(3)));
  });
  return make("div", {}, head, make("div", {class: "big", "data-top": top}, called(top)),
    make("p", {class: "soft"}, `the ${named ? "class" : "index"} of the largest value`), list);
}
