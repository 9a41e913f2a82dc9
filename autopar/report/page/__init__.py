"""A plan as one HTML page: no network, nothing but the file.

===================== =================================================================================================
:mod:`.html_page`     the page: template, style and script (``page.html.j2``, ``page.css``, ``page.js``) and its facts
:mod:`.block_cards`   the model as blocks, coloured by how their operators are cut
:mod:`.gantt`         the schedule over time; :mod:`.memory_chart`: memory over the step
:mod:`.seconds_spent` where the seconds of a step go, and the bytes that collectives move; :mod:`.seconds_table`: as a
                      bar and a table
:mod:`.link_load`     what each kind of link carries; :mod:`.tradeoff`: other layouts, time against memory
:mod:`.markup`        pieces of HTML and SVG in which every text is escaped
===================== =================================================================================================
"""
