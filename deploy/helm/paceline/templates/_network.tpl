{{/* A peer: the pods of a role in this release. */}}
{{- define "paceline.peer" -}}
podSelector:
  matchLabels:
    {{- include "paceline.selector" . | nindent 4 }}
{{- end }}

{{- define "paceline.namespacePeer" -}}
namespaceSelector:
  matchLabels:
    kubernetes.io/metadata.name: {{ . }}
{{- end }}

{{/*
The ports of a rule: dict root, role, ports (names, or "any"), workloads. Containers of one pod listen on neighbouring ports.
*/}}
{{- define "paceline.policyPorts" -}}
{{- $most := 1 -}}
{{- $role := .role -}}
{{- range .workloads -}}{{- if eq .role $role -}}{{- $most = max $most (int .settings.containers) -}}{{- end -}}{{- end -}}
{{- if kindIs "string" .ports -}}
{}
{{- else -}}
ports:
  {{- range .ports }}
  {{- $number := include "paceline.port" (dict "root" $.root "role" $role "port" .) | int }}
  - {protocol: TCP, port: {{ $number }}{{ if gt (int $most) 1 }}, endPort: {{ sub (add $number $most) 1 }}{{ end }}}
  {{- end }}
{{- end -}}
{{- end }}

{{/* The ports of /metrics of a role's pods, beside the coordinator's: dict role, workloads. Empty where no pod has one. */}}
{{- define "paceline.metricsPorts" -}}
{{- $role := .role -}}
{{- $ports := list -}}
{{- range .workloads -}}
{{- if and (eq .role $role) (ne .kind "coordinator") .settings.metricsPort -}}
{{- $first := int .settings.metricsPort -}}
{{- $port := dict "protocol" "TCP" "port" $first -}}
{{- if gt (int .settings.containers) 1 }}{{- $_ := set $port "endPort" (sub (add $first .settings.containers) 1) }}{{- end -}}
{{- $ports = append $ports $port -}}
{{- end -}}
{{- end -}}
{{- with $ports | uniq -}}
{{ dict "ports" . | toYaml }}
{{- end -}}
{{- end }}
