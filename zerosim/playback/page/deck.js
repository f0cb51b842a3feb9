// The deck: one slide at a time, by keys alone. A question keeps its answer until a key asks for it.
const root = document.documentElement, nav = document.querySelector('nav'), keys = document.querySelector('.keys');
const slides = [...document.querySelectorAll('.slide')];
const NEXT = ['ArrowRight', 'ArrowDown', 'PageDown', ' '], BACK = ['ArrowLeft', 'ArrowUp', 'PageUp'];
let at = 0, typed = '';

const boxOf = (slide) => slide.querySelector('input');
const hasAnswer = (slide) => slide.classList.contains('guess') && !slide.classList.contains('shown');

function show(number) {
  at = Math.max(0, Math.min(slides.length - 1, number));
  slides.forEach((slide, place) => slide.classList.toggle('here', place === at));
  typed = '';
  count();
  const box = boxOf(slides[at]);
  (box && hasAnswer(slides[at]) ? box : slides[at]).focus({ preventScroll: true });
  scrollTo(0, 0);
  try { history.replaceState(null, '', `#${at + 1}`); } catch { /* a frame without an address */ }
}

function count() {
  nav.querySelector('span').textContent = typed ? `to slide ${typed}: Enter` : `${at + 1} / ${slides.length}`;
}

function reveal(slide) {
  slide.classList.add('shown');
  slide.querySelector('.answer').hidden = false;
  const box = boxOf(slide);
  if (!box) return;
  compare(slide, box);
  box.blur();
}

// How far the room's number is from the count.
function compare(slide, box) {
  const guess = Number(box.value.replace(',', '.')) * Number(box.dataset.scale), counted = Number(box.dataset.counted);
  const said = slide.querySelector('.said');
  if (!(guess > 0)) { said.textContent = ''; return; }
  const off = Math.abs(guess - counted) / counted, side = guess > counted ? 'high' : 'low';
  const factor = Math.max(guess, counted) / Math.min(guess, counted);
  if (off < 0.005) said.textContent = 'The room is right.';
  else if (factor < 1.5) said.textContent = `The room is ${(100 * off).toPrecision(2)} % too ${side}.`;
  else said.textContent = `The room is too ${side}, by a factor of ${factor.toFixed(1)}.`;
}

function choose(slide, digit) {
  const options = [...slide.querySelectorAll('.options li')];
  if (!options[digit - 1]) return false;
  options.forEach((one, place) => one.classList.toggle('chosen', place === digit - 1));
  return true;
}

function turnTheme() {
  const dark = root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  root.dataset.theme = dark ? 'light' : 'dark';
}

function press(key) {
  const slide = slides[at];
  if (NEXT.includes(key)) {
    if (hasAnswer(slide)) reveal(slide);
    else show(at + 1);
  } else if (BACK.includes(key)) show(at - 1);
  else if (key === 'Home') show(0);
  else if (key === 'End') show(slides.length - 1);
  else if (key === 'Enter') {
    if (typed) show(Number(typed) - 1);
    else if (hasAnswer(slide)) reveal(slide);
  } else if (/^[0-9]$/.test(key)) {
    if (!(hasAnswer(slide) && choose(slide, Number(key)))) { typed = `${typed}${key}`.slice(0, 3); count(); }
  } else if (key === 's') root.classList.toggle('noted');
  else if (key === 't') turnTheme();
  else if (key === 'f') { if (document.fullscreenElement) document.exitFullscreen(); else root.requestFullscreen().catch(() => {}); }
  else if (key === '?') keys.hidden = !keys.hidden;
  else if (key === 'Escape') { keys.hidden = true; root.classList.remove('noted'); typed = ''; count(); }
  else return false;
  return true;
}

addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const { target, key } = event;
  if (/^(A|BUTTON)$/.test(target.tagName) && (key === 'Enter' || key === ' ')) return; // a link or a button is meant
  if (target.tagName === 'INPUT') {
    if (key === 'Escape') target.blur();
    else if (key !== 'Enter' && !key.startsWith('Page') && (/^.$|^Backspace$|^Home$|^End$/.test(key) && key !== ' ')) return;
    else if (target.value && /^Arrow(Left|Right)$/.test(key)) return;
  }
  if (press(key)) event.preventDefault();
});
nav.addEventListener('click', (event) => { if (event.target.dataset.key) press(event.target.dataset.key); });
document.querySelectorAll('.options').forEach((list) => list.addEventListener('click', (event) => {
  const place = [...list.children].indexOf(event.target.closest('li'));
  if (place >= 0 && hasAnswer(slides[at])) choose(slides[at], place + 1);
}));
addEventListener('hashchange', () => fromAddress());

function fromAddress() {
  const number = Number(location.hash.slice(1));
  if (Number.isInteger(number) && number !== at + 1) show(number ? number - 1 : 0);
}

root.classList.add('scripted');
show((Number(location.hash.slice(1)) || 1) - 1);
root.dataset.ready = 'true';
