"""Style sheet of the report's page. Colours are told apart by people who are colour-blind too."""

STYLE = """
:root { color-scheme: light dark;
  --page: #f7f7f5; --card: #ffffff; --ink: #1d2126; --soft: #5d6670; --line: #dfe2e5;
  --device: #2f74b8; --late: #e0a100; --evicted: #8a5cc2; --unpredicted: #cc4b37;
  --unknown: #a0683c; --other: #aab2ba; --hit: #2b9a72; --guess: #56a9e0; --demand: #34566f;
  --heat-ink: 43, 154, 114; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171a; --card: #1d2125; --ink: #e6e9ec; --soft: #9aa4ad; --line: #343b41;
  --device: #5b9edd; --late: #efbf3f; --evicted: #ac86e0; --unpredicted: #ea7562;
  --unknown: #c98f63; --other: #66717b; --hit: #43b98c; --guess: #74c0f0; --demand: #8fb3cc;
  --heat-ink: 67, 185, 140; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 28px 20px 40px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 2px; }
section, .notices { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 16px 20px; margin: 16px 0 0; }
section > p { color: var(--soft); margin: 0 0 10px; }
.plan { color: var(--soft); margin: 0; overflow-wrap: anywhere; }
.summary { font-size: 18px; line-height: 1.45; margin: 14px 0 0; }
.notices { padding-left: 38px; color: var(--soft); border-left: 4px solid var(--late); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 6px; font-size: 13px;
  color: var(--ink); }
.legend span { white-space: nowrap; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 2px;
  margin-right: 6px; vertical-align: -1px; }
.legend i.mark, .legend i.limit { height: 3px; border-radius: 0; vertical-align: 4px;
  background: var(--ink); }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--line); } .axis { stroke: var(--soft); }
.mark { stroke: var(--ink); stroke-width: 2.5; }
.limit { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 6 4; }
i.device { background: var(--device); } svg .device { fill: var(--device); }
i.late { background: var(--late); } svg .late { fill: var(--late); }
i.evicted { background: var(--evicted); } svg .evicted { fill: var(--evicted); }
i.unpredicted { background: var(--unpredicted); } svg .unpredicted { fill: var(--unpredicted); }
i.unknown { background: var(--unknown); } svg .unknown { fill: var(--unknown); }
i.other { background: var(--other); } svg .other { fill: var(--other); }
i.hit, i.used { background: var(--hit); } svg .hit { fill: var(--hit); }
i.guess { background: var(--guess); } svg .guess { fill: var(--guess); }
i.demand { background: var(--demand); } svg .demand { fill: var(--demand); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th { text-align: left; font-weight: 500; color: var(--soft); white-space: nowrap; }
td, th { padding: 3px 18px 3px 0; }
.totals td { color: var(--ink); }
.heat td, .heat thead th { text-align: center; min-width: 34px; padding: 5px 4px; }
.heat thead th:first-child { text-align: left; }
.heat th { padding-right: 12px; }
.heat td { background: rgba(var(--heat-ink), calc(var(--heat, 0%) * 0.75));
  border: 1px solid var(--card); }
.share { display: flex; height: 22px; border-radius: 4px; overflow: hidden; margin: 4px 0 8px;
  background: var(--line); }
.share i { display: block; height: 100%; }
footer { color: var(--soft); font-size: 13px; margin-top: 20px; overflow-wrap: anywhere; }
@media print { body { background: none; } section { break-inside: avoid; } }
"""
