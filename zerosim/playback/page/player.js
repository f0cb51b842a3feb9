// The player: what is shown, and what keys, buttons and the pointer do to it. Drawing is a function of `state`.

const SPEEDS = [0.25, 0.5, 1, 2, 4];
const LINES = 412; // of the lecture view: a text of 10.5 is 2.5 % of its height
const main = document.getElementById('player');
const root = document.documentElement;
const parts = {};

if (DATA.schema !== SCHEMA || DATA.version !== VERSION) {
  main.textContent = `This page's data are version ${DATA.version} of ${DATA.schema}; its player reads version ${VERSION} of ${SCHEMA}. Write the page anew.`;
} else start();

function start() {
  const runs = DATA.runs.map((run) => new Run(run));
  const dark = matchMedia('(prefers-color-scheme: dark)');
  const still = matchMedia('(prefers-reduced-motion: reduce)');
  const state = { run: 0, beside: -1, k: runs[0].start, by: 'collectives', rank: runs[0].ranks[0], speed: 2, look: 'auto', guess: false,
    question: null, said: '', score: { asked: 0, right: 0 }, chosen: {}, playing: 0, printing: false, lecture: false };
  const run = () => runs[state.run];
  const other = () => (state.beside >= 0 ? runs[state.beside] : null);
  let [track, trackKey, legendKey, room] = [null, '', '', null];

  // -- the frame of the page: player.html --
  for (const one of main.querySelectorAll('[id]')) parts[one.id] = one;
  const PLAY = 'M3,1l11,7l-11,7Z';
  const PAUSE = 'M3,1h4v14h-4Z M9,1h4v14h-4Z';
  SPEEDS.forEach((speed, index) => parts.speed.append(html('option', { value: index }, `${speed} ×`)));
  runs.forEach((one, index) => {
    if (runs.length > 1) parts.stages.append(html('button', { title: `${one.data.name} (${one.data.stage})`, onclick: () => choose(index) }, one.data.name));
    parts.beside.append(html('option', { value: index }, `+ ${one.data.name}`));
  });
  parts.beside.hidden = runs.length < 2;
  parts.speed.onchange = () => { state.speed = Number(parts.speed.value); again(); };
  parts.by.onchange = () => { state.by = parts.by.value; render(); };
  parts.beside.onchange = () => { state.beside = Number(parts.beside.value); render(); };
  parts.slider.oninput = () => go(Number(parts.slider.value));
  parts.help.querySelector('button').onclick = () => parts.help.close();
  main.querySelectorAll('[data-key]').forEach((one) => { one.onclick = () => KEYS[one.dataset.key]({}); });

  // -- going on --
  function go(k, moves = false) {
    const target = clamp(k, 0, run().length);
    const before = state.k;
    if (target !== before) state.said = '';
    state.k = target;
    if (state.question && state.question.at !== target) state.question = null;
    const old = [...parts.world.children];
    render();
    if (moves) fit(); // now, for a later change would end the motion
    if (!moves || still.matches || before >= target) return 0;
    return Math.max(0, ...[...parts.world.children].map((now, index) => {
      const [one, each] = [index ? other() : run(), (k) => (index ? other().follow(run(), k) : k)];
      return travel(one, each(before), each(target), old[index], now, SPEEDS[state.speed]);
    }));
  }
  function step(sign, by = state.by) {
    const key = by === 'collectives' ? (sign > 0 ? run().nextKey(state.k) : run().lastKey(state.k)) : state.k + sign;
    const next = state.guess && sign > 0 ? run().nextCall(state.k) : null;
    if (next && key > next.first) {
      pause();
      state.said = '';
      state.question = { ...choicesOf(run(), next.call), at: state.k, call: next.call }; // what is allocated for it would tell
      render();
      const first = parts.panel.querySelector('.question button');
      if (first) first.focus({ preventScroll: true });
      return 0;
    }
    return go(key, sign > 0);
  }
  function answer(name) {
    const { right, call } = state.question;
    state.score = { asked: state.score.asked + 1, right: state.score.right + (name === right) };
    const said = name === right ? `Right: ${right}.` : `No: it is ${right}.`;
    state.question = null;
    go(call.last + 1, true);
    state.said = said;
    render();
    parts.world.focus({ preventScroll: true });
  }
  function play() {
    if (state.k >= run().length) state.k = run().start;
    const pace = state.by === 'collectives' ? 1100 : 110;
    const next = (moving) => {
      state.playing = setTimeout(() => {
        const moved = step(1);
        if (state.k >= run().length) pause(); else if (state.playing) next(moved);
      }, moving + pace / SPEEDS[state.speed]);
    };
    next(0);
    render();
  }
  function pause() { clearTimeout(state.playing); state.playing = 0; render(); }
  function again() { if (state.playing) { clearTimeout(state.playing); play(); } else render(); }
  function choose(index) {
    const k = runs[index].follow(run(), state.k);
    Object.assign(state, { run: index, chosen: {}, question: null, said: '' });
    if (!run().info.has(state.rank)) state.rank = run().ranks[0];
    state.k = state.by === 'collectives' ? run().keys.reduce((best, key) => (Math.abs(key - k) < Math.abs(best - k) ? key : best), 0) : k;
    render();
  }
  function pick(what) {
    if (what.rank !== undefined) { state.rank = what.rank; state.chosen = {}; } else state.chosen = what;
    if (what.buffer) state.rank = what.buffer.rank;
    render();
  }

  // -- drawing --
  // Type grows with the window: pictures are drawn in units, of which a window of 1280 x 720 has one a pixel, and in the
  // lecture view a window's height LINES.
  function measure() {
    root.classList.toggle('lecture', state.lecture);
    const stacked = getComputedStyle(main).getPropertyValue('--stacked').trim() === '1';
    const scale = state.lecture ? innerHeight / LINES : parseFloat(getComputedStyle(root).fontSize) / 16;
    room = { stacked, scale, space: { width: (parts.world.clientWidth - 4) / scale, height: stacked ? 0 : (parts.world.clientHeight - 6) / scale },
      band: { width: Math.max(200, parts.track.clientWidth / scale), height: Math.max(110, parts.track.clientHeight / scale) } };
  }
  // Draw anew where words changed the room.
  function fit() {
    const before = JSON.stringify(room);
    measure();
    if (JSON.stringify(room) !== before) render();
  }
  function sized(picture) {
    ['width', 'height'].forEach((name) => picture.setAttribute(name, f1(picture.getAttribute(name) * room.scale)));
    return picture;
  }
  function lecture() {
    Object.assign(state, { lecture: !state.lecture, beside: -1, chosen: {}, by: 'collectives' });
    measure();
    render();
    fit();
  }
  function render() {
    if (state.lecture) state.beside = -1;
    const scroll = parts.panel.scrollTop; // read before anything changes
    const focused = document.activeElement && document.activeElement.getAttribute('data-pick');
    const inside = [parts.world, parts.panel].find((part) => part.contains(document.activeElement));
    theme = state.printing ? 'light' : state.look === 'auto' ? (dark.matches ? 'dark' : 'light') : state.look;
    ink = DATA.themes[theme];
    if (root.dataset.theme !== theme) {
      root.dataset.theme = theme;
      Object.entries(ink).forEach(([name, color]) => root.style.setProperty(`--${name}`, color));
    }
    const one = run();
    const two = other();
    const wide = state.by === 'collectives';
    const shownUnit = state.lecture && unitAt(one, state.k, state.rank);
    const lent = shownUnit && !one.data.flats[shownUnit.flat].name.startsWith(shownUnit.unit) ? ` (uses ${one.data.flats[shownUnit.flat].name}’s)` : '';
    parts.title.textContent = one.data.about + (shownUnit ? `: ${shownUnit.unit}${lent}` : '');
    parts.sub.textContent = `${one.data.model} · Ψ = ${num(one.data.parameters)} parameters in ${one.data.dtype} · ${count(Object.keys(one.data.units).length, 'unit')} over ${count(one.data.flats.length, 'flat buffer')}`;
    parts.sub.title = parts.sub.textContent;
    parts.play.querySelector('path').setAttribute('d', state.playing ? PAUSE : PLAY);
    parts.lecture.setAttribute('aria-pressed', state.lecture);
    parts.play.setAttribute('aria-label', state.playing ? 'Pause' : 'Play');
    parts.by.value = state.by;
    parts.speed.value = state.speed;
    parts.beside.value = state.beside;
    parts.guess.setAttribute('aria-pressed', state.guess);
    [...parts.stages.children].forEach((tab, index) => tab.setAttribute('aria-pressed', index === state.run));
    parts.slider.max = one.length;
    parts.slider.value = state.k;
    parts.slider.setAttribute('aria-valuetext', `event ${state.k} of ${one.length}`);
    // Now.
    const now = nowParts(one, state.k, wide);
    parts.where.textContent = `${now.where} · event ${num(state.k)} of ${num(one.length)}`;
    parts.now.setAttribute('aria-live', state.playing ? 'off' : 'polite');
    const words = `${state.said ? `${state.said} ` : ''}${state.question ? 'All ranks come to a collective.' : now.words}`;
    if (parts.now.textContent !== words) parts.now.textContent = words;
    parts.nowMore.replaceChildren(...(one.data.lines.length && !state.question ? [sourceBlock(now.source)] : []));
    // The ranks.
    const { stacked, space, band } = room;
    const shown = two && two !== one ? [one, two] : [one];
    const most = Math.max(...shown.map((each) => each.most));
    const k2 = shown.length > 1 ? two.follow(one, state.k) : 0;
    const across = shown.length > 1 && !stacked ? (space.width - 24) / 2 : space.width;
    parts.world.replaceChildren(...shown.map((each, index) => sized((state.lecture ? drawLecture : drawWorld)(each, index ? k2 : state.k, { width: state.lecture ? across : Math.max(200, across), height: space.height, most,
      prefix: `h${index}`, title: shown.length > 1 ? each.data.about : '', pick: index ? () => {} : pick, chosen: index ? {} : { ...state.chosen, rank: state.rank } }))));
    // The column beside it.
    const buffers = one.live(state.k).get(state.rank);
    parts.panel.replaceChildren(...[questionPart(state.question, answer, state.score), detail(one, state.k, state.chosen, pick),
      gauge(one, state.rank, state.k, shown.length > 1 ? one.data.name : ''), shown.length > 1 && two.info.has(state.rank) ? gauge(two, state.rank, k2, two.data.name) : null,
      liveList(one, state.rank, buffers, state.chosen, pick, (rank) => pick({ rank }))].filter(Boolean));
    if (scroll) parts.panel.scrollTop = scroll;
    // Over events.
    const key = [state.run, state.beside, state.rank, band.width, band.height, theme, most].join('/');
    if (key !== trackKey) {
      track = drawTrack(one, state.rank, band.width, band.height, 't', most, shown[1]);
      trackKey = key;
    }
    const hide = state.guess ? rect(track.X(state.k) + 2, track.top + track.h + 2, Math.max(0, track.X(one.length) - track.X(state.k)), 3 * TRACK.ribbon, { fill: ink.background }) : null;
    parts.track.replaceChildren(sized(svg('svg', { ...band, viewBox: `0 0 ${band.width} ${band.height}`, 'font-family': FONT, role: 'img',
      'aria-label': track.label }, hatches('t'), track.root, hide, drawCursor(track, one, state.k, state.chosen))));
    if (legendKey !== (legendKey = [state.run, state.beside, theme, root.dataset.agrees].join('/'))) drawLegend(shown);
    if (focused && inside && !inside.contains(document.activeElement)) {
      const back = inside.querySelector(`[data-pick="${CSS.escape(focused)}"]`);
      (back || inside).focus({ preventScroll: true });
    }
    keep();
  }
  function drawLegend(shown) {
    const kinds = Object.keys(DATA.kinds).filter((kind) => shown.some((each) => each.data.words.includes(kind)));
    const items = kinds.map((kind) => {
      const patch = svg('svg', { width: 18, height: 14, viewBox: '0 0 18 14', 'aria-hidden': 'true', 'font-family': FONT }, hatches('l'), area(kind, 0, 0, 18, 14, 'l'));
      return html('span', { class: 'item', title: DATA.kinds[kind].meaning }, patch, ` ${kindWord(kind)}`);
    });
    const away = [...shown[0].memories.keys()].map((name) => ` ${name[0].toUpperCase()}: ${MEMORIES[name]}.`).join('');
    const how = `Filled: here. Outlined: on another rank. Raised: gathered.${away}`;
    const left = shown[0].data.left_out.length ? ' Kernels are left out, to keep the page small.' : '';
    parts.legend.replaceChildren(...items, html('span', { class: 'note' }, `${how} Recorded by zerosim ${DATA.zerosim}.${root.dataset.agrees === 'true' ? ' The bars equal the ledger at every mark.' : ''}${left}`));
  }

  // -- the URL's hash keeps the moment --
  let kept = '';
  function keep() {
    const values = { run: state.run, at: state.k, by: state.by, rank: state.rank };
    if (state.beside >= 0) values.beside = state.beside;
    if (state.look !== 'auto') values.look = state.look;
    const hash = `#${state.lecture ? 'lecture&' : ''}${new URLSearchParams(values)}`;
    if (hash === kept || state.playing) return;
    kept = hash;
    try { history.replaceState(null, '', hash); } catch { /* a frame without an address */ }
  }
  function recall() {
    const values = new URLSearchParams(location.hash.slice(1) || DATA.opens);
    const missing = [];
    const whole = (name, high, otherwise, what) => {
      const text = values.get(name);
      const value = text ? Number(text) : NaN;
      if (Number.isInteger(value) && value >= (name === 'beside' ? -1 : 0) && value <= high) return value;
      if (text !== null) missing.push(`${what} ${short(text, 12)}: there are ${what}s 0 to ${num(high)}`);
      return otherwise;
    };
    state.run = whole('run', runs.length - 1, 0, 'run');
    state.k = whole('at', run().length, run().start, 'moment');
    state.rank = run().ranks.find((rank) => String(rank) === values.get('rank')) ?? run().ranks[0];
    if (values.has('rank') && String(state.rank) !== values.get('rank')) missing.push(`rank ${short(values.get('rank'), 12)}: there are ${ranksText(run().ranks)}`);
    state.beside = whole('beside', runs.length - 1, -1, 'run');
    state.lecture = values.has('lecture');
    if (['collectives', 'events'].includes(values.get('by'))) state.by = values.get('by');
    if (['light', 'dark'].includes(values.get('look'))) state.look = values.get('look');
    Object.assign(state, { chosen: {}, question: null, said: missing.length ? `The address names no ${missing.join(', and no ')}.` : '' });
  }

  // -- what else the buttons do --
  function toggleLook() { state.look = theme === 'dark' ? 'light' : 'dark'; render(); }
  function save() {
    const worlds = [...parts.world.querySelectorAll(':scope > svg')].map((one) => one.cloneNode(true));
    const band = parts.track.querySelector('svg').cloneNode(true);
    const width = Math.max(parts.world.clientWidth, band.width.baseVal.value) + 24;
    const frame = svg('svg', { xmlns: SVG_NS, 'font-family': FONT });
    let y = 58;
    let x = 12;
    frame.append(text(12, 24, parts.title.textContent, { size: 18, weight: 700 }), text(12, 44, parts.now.textContent, { size: 13 }));
    const tall = Math.max(...worlds.map((one) => Number(one.getAttribute('height'))));
    for (const one of worlds) { one.setAttribute('x', x); one.setAttribute('y', y); x += Number(one.getAttribute('width')) + 24; frame.append(one); }
    y += tall + 10;
    band.setAttribute('x', 12);
    band.setAttribute('y', y);
    frame.append(band);
    y += band.height.baseVal.value + 24;
    let at = 12;
    for (const kind of Object.keys(DATA.kinds).filter((name) => run().data.words.includes(name))) {
      const name = kindWord(kind);
      if (at + name.length * 6.5 + 40 > width) { at = 12; y += 20; }
      frame.append(...area(kind, at, y - 12, 18, 14, 't'), text(at + 23, y - 1, name, { size: 12 }));
      at += name.length * 6.5 + 40;
    }
    const [w, h] = [Math.ceil(width), Math.ceil(y + 12)];
    fill(frame, { width: w, height: h, viewBox: `0 0 ${w} ${h}` });
    frame.prepend(svg('rect', { width: '100%', height: '100%', fill: ink.background }));
    const blob = new Blob([new XMLSerializer().serializeToString(frame)], { type: 'image/svg+xml' });
    const link = html('a', { href: URL.createObjectURL(blob), download: `zerosim-stage${run().data.stage}-event${state.k}.svg` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  // -- keys and pointer --
  const KEYS = {
    ' ': () => (state.playing ? pause() : play()), ArrowRight: (event) => step(1, event.shiftKey ? 'events' : state.by), ArrowLeft: (event) => step(-1, event.shiftKey ? 'events' : state.by),
    Home: () => go(run().start), End: () => go(run().length), c: () => { state.by = 'collectives'; again(); }, e: () => { state.by = 'events'; again(); },
    '+': () => { state.speed = Math.min(SPEEDS.length - 1, state.speed + 1); again(); }, '-': () => { state.speed = Math.max(0, state.speed - 1); again(); },
    b: () => { state.beside = state.beside < 0 && runs.length > 1 ? (state.run + 1) % runs.length : -1; render(); }, g: () => { Object.assign(state, { guess: !state.guess, question: null, said: '' }); render(); }, s: save, t: toggleLook, '?': () => parts.help.showModal(), f: lecture, n: () => step(1),
    r: () => pick({ rank: run().ranks[(run().ranks.indexOf(state.rank) + 1) % run().ranks.length] }), Escape: () => pick({}),
  };
  addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || parts.help.open) return;
    const target = event.target;
    if (target.matches('select, input[type=range]') && event.key.startsWith('Arrow')) return;
    if (parts.world.contains(target) && walk(event)) { event.preventDefault(); return; }
    if (event.key === ' ' && target.matches('button, select')) return;
    const stage = '0123'.includes(event.key) ? runs.findIndex((one) => String(one.data.stage) === event.key) : -1;
    if (stage >= 0) choose(stage);
    else if (KEYS[event.key]) KEYS[event.key](event);
    else return;
    event.preventDefault();
  });
  // From shard to shard, where one of them has the focus.
  function walk(event) {
    const items = [...parts.world.querySelectorAll('[data-pick]')];
    const at = items.indexOf(event.target);
    if (event.key === 'Enter' && items.length) {
      if (at < 0) items[0].focus(); else event.target.dispatchEvent(new Event('click'));
      return true;
    }
    if (at < 0 || !event.key.startsWith('Arrow')) return false;
    const centre = (item) => { const box = item.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; };
    const [cx, cy] = centre(event.target);
    const [ux, uy] = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    const far = (item) => {
      const [dx, dy] = [centre(item)[0] - cx, centre(item)[1] - cy];
      const [along, off] = [dx * ux + dy * uy, Math.abs(dx * uy) + Math.abs(dy * ux)];
      return along > 1 && off <= along * 2 ? along + 3 * off : Infinity;
    };
    const best = items.reduce((one, item) => (far(item) < far(one) ? item : one));
    if (far(best) < Infinity) best.focus({ preventScroll: true });
    return true;
  }
  const drag = (event) => {
    if (event.buttons !== 1) return;
    const x = event.clientX - parts.track.getBoundingClientRect().x;
    go(Math.round(((x / room.scale - track.left) / track.w) * run().length));
  };
  parts.track.addEventListener('pointerdown', (event) => { parts.track.setPointerCapture(event.pointerId); drag(event); });
  parts.track.addEventListener('pointermove', drag);
  addEventListener('hashchange', () => { if (location.hash !== kept) { recall(); measure(); render(); fit(); } });
  dark.addEventListener('change', render);
  addEventListener('beforeprint', () => { state.printing = true; render(); });
  addEventListener('afterprint', () => { state.printing = false; render(); });
  const resized = new ResizeObserver(fit);
  [main, parts.world, parts.track].forEach((part) => resized.observe(part));

  recall();
  measure();
  render();
  fit();
  setTimeout(() => { root.dataset.agrees = runs.every((one) => one.agrees()); render(); root.dataset.ready = 'true'; });
}
