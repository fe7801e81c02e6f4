"""For who watches the daemon from elsewhere: a Grafana dashboard and alert rules of Prometheus, over `/metrics`.

Data only: `grafana.json` is imported in Grafana (Dashboards, New, Import), `alerts.yml` is named by `rule_files` in
Prometheus' configuration.
"""
