// Evaluates exported terms exactly. Nothing here is a formula of zerosim's: those are in the data.
const plus = ([a, b], [c, d]) => [a * d + c * b, b * d];
const times = ([a, b], [c, d]) => [a * c, b * d];
const less = ([a, b], [c, d]) => a * d < c * b;
const powered = ([a, b], power) => (power < 0 ? [b ** BigInt(-power), a ** BigInt(-power)] : [a ** BigInt(power), b ** BigInt(power)]);

function valueOf(atom, letters) {
  if (typeof atom === 'string') {
    if (letters[atom] === undefined) throw new Error(`no value for ${atom}`);
    return [BigInt(letters[atom]), 1n];
  }
  const parts = atom.parts.map((part) => evaluated(part, letters));
  if (atom.kind === 'ring') return [parts[0][0] - parts[0][1], parts[0][0]];
  return parts.reduce((least, one) => (less(one, least) ? one : least));
}

function evaluated(terms, letters) {
  let sum = [0n, 1n];
  for (const [above, below, factors] of terms) {
    let term = [BigInt(above), BigInt(below)];
    for (const [atom, power] of factors) term = times(term, powered(valueOf(atom, letters), power));
    sum = plus(sum, term);
  }
  return sum;
}

// Every ratio of the page as [numerator, denominator]; the rest of the page shows it as a number.
const asNumber = ([above, below]) => Number((above * 1000n) / below) / 1000;

function wayIndex(grid, point) {
  return ['stage', 'precision', 'recompute', 'recipe'].reduce(
    (index, name) => index * grid[name].length + grid[name].indexOf(point[name]), 0);
}

// The rows of a point: subject, name, axis, the form's text, and its value for a rank.
function calculated(data, point) {
  const model = data.models.find((one) => one.name === point.model);
  const placed = model.tp[point.tp];
  if (placed.refused) return { refused: placed.refused };
  const at = data.grid.ranks.indexOf(point.ranks);
  const padded = Object.fromEntries(Object.entries(placed.padded).map(([letter, values]) => [letter, values[at]]));
  const way = data.ways[placed.ways[wayIndex(data.grid, point)]];
  const letters = { ...placed.letters, ...(way.padded ? padded : {}), ...way.letters, N: point.ranks, b: point.micro_batch, s: point.seq };
  const rows = ((point.ranks === 1 && way.alone) || way.rows).map(([subject, name, axis, index]) => {
    const [text, terms] = data.forms[index];
    return { subject, name, axis, text, value: evaluated(terms, letters) };
  });
  const error = placed.errors[`${point.precision.split('-')[0]} ${point.recompute}`];
  return { rows, exact: way.exact, error };
}

function commandOf(data, point) {
  const more = Object.keys(data.models.find((one) => one.name === point.model).tp[point.tp].more || {});
  const values = { ...point, ranks: point.ranks * point.tp };
  const flag = (name) => `--${name.replaceAll('_', '-')}`;
  return ['zerosim plan', ...data.words.map((name) => `${flag(name)} ${values[name]}`), ...more.map(flag)].join(' ');
}
