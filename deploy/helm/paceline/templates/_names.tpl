{{/* Names and labels. */}}

{{- define "paceline.name" -}}
{{- if contains "paceline" .Release.Name -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{- else -}}{{ printf "%s-paceline" (.Release.Name | trunc 31 | trimSuffix "-") }}{{- end -}}
{{- end }}

{{/* Labels of an object: dict root, role, pool. */}}
{{- define "paceline.labels" -}}
app.kubernetes.io/name: paceline
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{ include "paceline.selector" . }}
{{- end }}

{{/* Labels that select pods: dict root, role, pool (both may be empty). */}}
{{- define "paceline.selector" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .pool }}
paceline/pool: {{ . }}
{{- end }}
{{- end }}

{{/* HOST:PORT of the coordinator. */}}
{{- define "paceline.coordinator" -}}
{{- if .Values.coordinator.enabled -}}
{{ include "paceline.name" . }}-coordinator.{{ .Release.Namespace }}.svc:{{ include "paceline.port" (dict "root" . "role" "coordinator" "port" "grpc") }}
{{- else -}}
{{ required "coordinator.enabled is false: give coordinator.address, the HOST:PORT of the coordinator elsewhere" .Values.coordinator.address }}
{{- end -}}
{{- end }}

{{/* HOST:PORT of the coordinator for people and commands, who have no certificate. */}}
{{- define "paceline.people" -}}
{{- $address := include "paceline.coordinator" . -}}
{{- if .Values.tls.secretName -}}
{{ regexReplaceAll ":[0-9]+$" $address (printf ":%v" .Values.tls.peoplePort) }}
{{- else -}}
{{ $address }}
{{- end -}}
{{- end }}

{{/* Keys of an endpoint of the Prometheus Operator under TLS: dict root, host (the name in the certificate). */}}
{{- define "paceline.scrape" -}}
{{- $tls := .root.Values.tls -}}
{{- if $tls.secretName -}}
scheme: https
tlsConfig:
  ca: {secret: {name: {{ $tls.secretName }}, key: ca.crt}}
  serverName: {{ .host }}
authorization:
  credentials: {name: {{ .root.Values.monitoring.token.secretName | default (include "paceline.tokenSecret" .root) }}, key: {{ .root.Values.monitoring.token.key }}}
{{- end -}}
{{- end }}

{{/* How a process is told about TLS: variables of its environment. */}}
{{- define "paceline.tlsEnv" -}}
{{- if .Values.tls.secretName -}}
- {name: PACELINE_TLS_DIR, value: /tls}
{{- else -}}
- {name: PACELINE_INSECURE, value: "1"}
{{- end -}}
{{- end }}

{{/* The Secret with a workload's certificate: dict root, kind. */}}
{{- define "paceline.tlsSecret" -}}
{{- $tls := .root.Values.tls -}}
{{- if eq .kind "coordinator" }}{{ $tls.coordinatorSecretName | default $tls.secretName }}{{ else }}{{ $tls.secretName }}{{ end -}}
{{- end }}

{{/* The Secret with the storage key, for the kinds of workloads that encrypt files: dict root, kind. */}}
{{- define "paceline.storageKey" -}}
{{- if has .kind (list "coordinator" "learner") }}{{ .root.Values.storageKey.secretName }}{{ end -}}
{{- end }}

{{/* All roles by name, from the one list. */}}
{{- define "paceline.roles" -}}
{{ (.Files.Get "files/roles.yaml" | fromYaml).roles | toYaml }}
{{- end }}

{{/* Port of a role by its name: dict root, role, port. */}}
{{- define "paceline.port" -}}
{{- $roles := include "paceline.roles" .root | fromYaml -}}
{{ index $roles .role "ports" .port | int }}
{{- end }}

{{/* Port of --port of a role: its entry in the list. */}}
{{- define "paceline.mainPort" -}}
{{ .ports.grpc | default .ports.http | int }}
{{- end }}

{{- define "paceline.tokenSecret" -}}
{{ .Values.token.existingSecret | default (printf "%s-token" (include "paceline.name" .)) }}
{{- end }}

{{/* Root of large files as --store takes it. */}}
{{- define "paceline.store" -}}
{{ .Values.store.url | default "/store" }}
{{- end }}

{{- define "paceline.storeClaim" -}}
{{ .Values.store.volume.existingClaim | default (printf "%s-store" (include "paceline.name" .)) }}
{{- end }}

{{/* Reference of an image: dict root, role, settings. */}}
{{- define "paceline.image" -}}
{{- $roles := include "paceline.roles" .root | fromYaml -}}
{{- $role := index $roles .role -}}
{{- $image := .root.Values.image -}}
{{- $variant := "" -}}
{{- if .settings.gpus -}}
{{- if not (has "gpu" $role.images) -}}{{- fail (printf "gpus is %v for the role %s, which has no GPU image (files/roles.yaml)" .settings.gpus .role) -}}{{- end -}}
{{- $variant = "-gpu" -}}
{{- end -}}
{{- .settings.image | default (printf "%spaceline-%s%s:%s" (ternary "" (printf "%s/" $image.registry) (empty $image.registry)) .role $variant ($image.tag | default .root.Chart.AppVersion)) -}}
{{- end }}

{{/* Settings of a workload over the defaults, as YAML: dict root, settings. */}}
{{- define "paceline.settings" -}}
{{ mergeOverwrite (deepCopy .root.Values.defaults) (deepCopy .settings) | toYaml }}
{{- end }}

{{/* "true" if KEDA scales a pool. */}}
{{- define "paceline.isScaler" -}}
{{- $found := "" -}}
{{- range (include "paceline.workloads" . | fromYaml).workloads -}}{{- if and (eq .kind "pool") .settings.autoscaling.enabled -}}{{- $found = "true" -}}{{- end -}}{{- end -}}
{{ $found }}
{{- end }}

{{/* Settings that defaults give to workers and that mean nothing for a page. */}}
{{- define "paceline.noWorker" -}}
{gpus: 0, containers: 1, httpPort: 0, sharedMemory: "", graceSeconds: 0, resourceClaims: [], fabric: {kind: none, interface: "", devices: 0, network: ""}}
{{- end }}

{{/* Clear the settings that a role has no option for: dict about, settings. */}}
{{- define "paceline.clear" -}}
{{- if not (has "http" .about.takes) }}{{- $_ := set .settings "httpPort" 0 }}{{- end -}}
{{- if not (has "fabric" .about.takes) }}{{- $_ := set .settings.fabric "interface" "" }}{{- end -}}
{{- end }}

{{/* All workloads: list of {name, role, kind, settings}. */}}
{{- define "paceline.workloads" -}}
{{- $roles := include "paceline.roles" . | fromYaml -}}
{{- $found := list -}}
{{- range $role, $about := $roles -}}
{{- if has $about.workload (list "coordinator" "learner" "page") -}}
{{- $settings := index $.Values $role -}}
{{- if $settings.enabled -}}
{{- $merged := include "paceline.settings" (dict "root" $ "settings" $settings) | fromYaml -}}
{{- if eq $about.workload "page" -}}
{{- range $key, $value := include "paceline.noWorker" . | fromYaml -}}{{- $_ := set $merged $key $value -}}{{- end -}}
{{- end -}}
{{- include "paceline.clear" (dict "about" $about "settings" $merged) -}}
{{- $found = append $found (dict "name" $role "role" $role "kind" $about.workload "settings" $merged) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $settings := .Values.pools -}}
{{- if $settings -}}
{{- $about := index $roles $settings.role -}}
{{- if or (not $about) (ne $about.workload "pool") -}}
{{- fail (printf "pools.%s.role is %q, which is no role of a pool (files/roles.yaml)" $name $settings.role) -}}
{{- end -}}
{{- if hasKey $roles $name -}}{{- if ne $name $settings.role -}}
{{- fail (printf "pools.%s has the name of another role than its own, %q" $name $settings.role) -}}
{{- end -}}{{- end -}}
{{- $merged := include "paceline.settings" (dict "root" $ "settings" $settings) | fromYaml -}}
{{- include "paceline.clear" (dict "about" $about "settings" $merged) -}}
{{- $found = append $found (dict "name" $name "role" $settings.role "kind" "pool" "settings" $merged) -}}
{{- end -}}
{{- end -}}
{{ dict "workloads" $found | toYaml }}
{{- end }}
