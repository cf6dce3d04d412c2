// Prometheus' text format: samples, differences between two polls, and quantiles of histograms.
const SAMPLE = /^([a-z_:][\w:]*)(?:\{(.*)\})? (\S+)/i, LABEL = /([a-z_]\w*)="((?:[^"\\]|\\.)*)"/gi;
const INFINITE = {"+Inf": Infinity, "-Inf": -Infinity};
const ESCAPED = {"\\n": "\n", '\\"': '"', "\\\\": "\\"};

export function series(text) {
  const found = [];
  for (const line of text.split("\n")) {
    const parts = line[0] === "#" ? null : SAMPLE.exec(line);
    if (!parts) continue;
    const labels = {};
    for (const [, name, value] of (parts[2] ?? "").matchAll(LABEL)) labels[name] = value.replace(/\\[n"\\]/g, (each) => ESCAPED[each]);
    found.push({name: parts[1], labels, value: INFINITE[parts[3]] ?? Number(parts[3])});
  }
  return found;
}

const matches = (sample, name, labels) =>
  sample.name === name && Object.entries(labels).every(([key, value]) => sample.labels[key] === value);

export function total(samples, name, labels) {
  return samples.reduce((sum, sample) => (matches(sample, name, labels) ? sum + sample.value : sum), 0);
}

export function difference(now, before, name, labels) {
  return Math.max(0, total(now, name, labels) - total(before, name, labels));
}

// The counts of a histogram between two polls: [upper bound, count], of each bucket alone.
export function buckets(now, before, name, labels) {
  const below = new Map();
  for (const sample of now) {
    if (matches(sample, `${name}_bucket`, labels)) below.set(sample.labels.le, (below.get(sample.labels.le) ?? 0) + sample.value);
  }
  for (const sample of before) {
    if (matches(sample, `${name}_bucket`, labels)) below.set(sample.labels.le, (below.get(sample.labels.le) ?? 0) - sample.value);
  }
  const ordered = [...below].map(([bound, value]) => [bound === "+Inf" ? Infinity : Number(bound), value]).sort((one, other) => one[0] - other[0]);
  return ordered.map(([bound, value], index) => [bound, value - (index ? ordered[index - 1][1] : 0)]);
}

// As Prometheus' histogram_quantile: linear within a bucket; null without samples.
export function quantile(now, before, name, labels, share) {
  const found = buckets(now, before, name, labels), all = found.reduce((sum, [, value]) => sum + value, 0);
  if (!all) return null;
  let left = share * all, low = 0;
  for (const [bound, value] of found) {
    if (left <= value && value) return bound === Infinity ? low : low + (bound - low) * left / value;
    left -= value;
    low = bound;
  }
  return low;
}
