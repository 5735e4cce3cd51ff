"""Jinja2 template of the HTML report.

Every value is escaped; `plots` and pictures' data are markup and base64 of our own making. Colours follow the reader's
choice of light or dark; the plots have the same variables. A policy in the page forbids what it does not need.
"""

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ end.pipeline }}: job report</title>
<style>
:root { --paper: #ffffff; --card: #f5f6f8; --ink: #1c2127; --soft: #5b6672; --grid: #dde1e6; --one: #2f6db3;
  --two: #d07a1c; --bad: #b3261e; --good: #1c7a43;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --card: #1e2329; --ink: #e6e9ed; --soft: #9aa5b1;
  --grid: #343b44; --one: #4a86cc; --two: #e39a4a; --bad: #f2857d; --good: #6cc592; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; font: 16px/1.45 var(--font); color: var(--ink);
  background: var(--paper); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; } p { margin: .3rem 0; }
.soft { color: var(--soft); } .bad { color: var(--bad); } .good { color: var(--good); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.figures div { background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }
.figures b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; line-height: 1.2; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: 1.5rem;
  align-items: start; }
figure { margin: 0; } figcaption { font-weight: 600; margin-bottom: .3rem; }
svg { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid var(--grid);
  overflow-wrap: break-word; }
th { font-weight: 600; color: var(--soft); font-size: .875rem; white-space: nowrap; }
td.n, th.n { text-align: right; white-space: nowrap; }
td.name { min-width: 6rem; } td.whole { white-space: nowrap; } td.long { min-width: 14rem; }
table.facts { width: auto; }
.name, .long, .facts td { max-width: 40rem; overflow-wrap: anywhere; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); gap: .8rem;
  align-items: start; }
.sample { background: var(--card); border-radius: .5rem; padding: .7rem .8rem; break-inside: avoid; }
.sample h3 { font-size: .95rem; margin: 0 0 .4rem; } .sample.failed { border-left: 4px solid var(--bad); }
.sample dl { margin: 0; } .sample dt { color: var(--soft); font-size: .85rem; margin-top: .4rem; }
.sample dd { margin: 0; white-space: pre-wrap; }
img { max-width: 100%; height: auto; display: block; border-radius: .25rem; }
.id { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .9em; }
@media print { :root { --paper: #fff; --card: #fff; --ink: #000; --soft: #444; --grid: #bbb; --one: #2f6db3; }
  body { max-width: none; padding: 0; font-size: 10.5pt; } .sample, .figures div { border: 1px solid #bbb; }
  .plots { grid-template-columns: 1fr 1fr; } figure { break-inside: avoid; } h2 { break-after: avoid; } }
</style>
</head>
<body>
<header>
<h1>{{ end.pipeline }}</h1>
<p class="{{ 'good' if end.finished and not end.errors else 'bad' if not end.finished else '' }}">{{ outcome }}</p>
{% for one in next_steps %}<p>{{ one }}</p>
{% endfor %}</header>
<div class="figures">
{% for label, value, bad in headlines %}<div><b{% if bad %} class="bad"{% endif %}>{{ value }}</b>\
<span class="soft">{{ label }}</span></div>
{% endfor %}</div>
<div class="plots">
{% for title, svg in plots %}<figure role="img" aria-label="{{ title }}"><figcaption>{{ title }}</figcaption>
{{ svg }}
</figure>
{% endfor %}</div>
{% if steps %}<h2>Steps</h2>
<div class="wide"><table>
<tr><th>step</th>{% for one in step_headings %}<th class="n">{{ one }}</th>{% endfor %}</tr>
{% for name, cells in steps %}<tr><td class="name">{{ name }}</td>\
{% for cell in cells %}<td class="n">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
<p class="soft">Times are from leaving for the worker to the result, one item at a time, to about 12 %. \
Busy is the share of {% if end.resumed %}the last{% else %}the{% endif %} run that an instance of the step was at work.\
</p>
{% endif %}{% if kinds %}<h2>Errors</h2>
<div class="wide"><table>
<tr><th class="n">#</th><th class="n">rows</th><th>step</th><th>error</th><th>reason</th><th>ids</th></tr>
{% for one in kinds %}<tr><td class="n">{{ loop.index }}</td><td class="n">{{ one.count }}</td>\
<td class="name">{{ one.step }}</td><td class="whole">{{ one.error }}</td>\
<td class="long">{{ one.reason }}</td><td class="id long">{{ one.ids }}</td></tr>
{% endfor %}</table></div>
{% endif %}{% if samples %}<h2>Samples</h2>
<div class="samples">
{% for sample in samples %}<article class="sample{% if sample.error %} failed{% endif %}">
<h3 class="id">{{ sample.id }}</h3>
{% if sample.error %}<p class="bad">{{ sample.error }}</p>
{% endif %}<dl>
{% for name, value in sample.values %}<dt>{{ name }}</dt><dd{% if value.absent %} class="soft"{% endif %}>\
{% for piece in value.pieces %}{% if piece.picture %}<img src="data:{{ piece.picture.mime }};base64,\
{{ piece.picture.data | base64 }}" width="{{ piece.picture.width }}" \
height="{{ piece.picture.height }}" alt="{{ name }}">\
{% endif %}{{ piece.text }}{% if not loop.last %}
{% endif %}{% endfor %}</dd>
{% endfor %}</dl>
</article>
{% endfor %}</div>
{% endif %}<h2>About this job</h2>
<div class="wide"><table class="facts">
{% for name, value in facts %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</table></div>
</body>
</html>
"""
