{{/*
The pod of a role: dict root, name, role, settings, args (strings beyond the role's own), kind.
Profile `restricted`, but for fabric.kind infiniband and roce, which need the capability IPC_LOCK.
*/}}
{{- define "paceline.podTemplate" -}}
{{- $root := .root -}}
{{- $settings := .settings -}}
{{- $roles := include "paceline.roles" $root | fromYaml -}}
{{- $about := index $roles .role -}}
{{- $named := dict "root" $root "role" .role "pool" .name -}}
{{- $grace := $settings.graceSeconds | default $about.grace_s | int -}}
{{- $fabric := $settings.fabric -}}
metadata:
  labels:
    app.kubernetes.io/name: paceline
    {{- include "paceline.selector" $named | nindent 4 }}
    {{- with $settings.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $annotations := deepCopy $settings.podAnnotations }}
  {{- with $fabric.network }}{{- $_ := set $annotations "k8s.v1.cni.cncf.io/networks" . }}{{- end }}
  {{- if and (eq .kind "learner") $root.Values.gang.enabled }}
  {{- $_ := set $annotations "scheduling.k8s.io/group-name" (printf "%s-learner" (include "paceline.name" $root)) }}
  {{- end }}
  {{- with $annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "paceline.name" $root }}-{{ .role }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add $grace $settings.preStopSeconds 10 }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- if $settings.priorityClassName }}
  priorityClassName: {{ $settings.priorityClassName }}
  {{- else if $root.Values.priorityClasses.create }}
  priorityClassName: {{ include "paceline.name" $root }}-{{ get (dict "coordinator" "control" "learner" "learner") .kind | default "workers" }}
  {{- end }}
  {{- if and (eq .kind "learner") $root.Values.gang.enabled }}
  schedulerName: volcano
  {{- else }}
  {{- with $settings.schedulerName }}
  schedulerName: {{ . }}
  {{- end }}
  {{- end }}
  {{- with $settings.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $settings.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $settings.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $settings.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if ne .kind "coordinator" }}
  topologySpreadConstraints:
    {{- if $settings.topologySpread }}
    {{- toYaml $settings.topologySpread | nindent 4 }}
    {{- else }}
    {{- range (ternary (list "kubernetes.io/hostname") (list "kubernetes.io/hostname" "topology.kubernetes.io/zone") (eq .kind "learner")) }}
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "paceline.selector" $named | nindent 10 }}
    {{- end }}
    {{- end }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- if $settings.resourceClaims }}
  resourceClaims:
    {{- range $index := until (int $settings.containers) }}
    {{- range $settings.resourceClaims }}
    - name: {{ .name }}-{{ $index }}
      resourceClaimTemplateName: {{ include "paceline.name" $root }}-{{ $.name }}-{{ .name }}
    {{- end }}
    {{- end }}
  {{- end }}
  {{- $pod := dict "root" $root "name" .name "role" .role "about" $about "settings" $settings "args" .args "kind" .kind "grace" $grace }}
  containers:
    {{- range $index := until (int $settings.containers) }}
    {{- include "paceline.container" (merge (dict "index" $index) $pod) | nindent 4 }}
    {{- end }}
  volumes:
    - name: token
      secret:
        secretName: {{ include "paceline.tokenSecret" $root }}
        defaultMode: 0440
        items: [{key: {{ $root.Values.token.key }}, path: token}]
    {{- with include "paceline.tlsSecret" (dict "root" $root "kind" .kind) }}
    - name: tls
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- with include "paceline.storageKey" (dict "root" $root "kind" .kind) }}
    - name: storage-key
      secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: {{ $root.Values.storageKey.key }}, path: key}]}
    {{- end }}
    - name: tmp
      emptyDir: {}
    - name: cache
      emptyDir: {sizeLimit: {{ $settings.cacheSize }}}
    {{- if has "code" $about.takes }}
    - name: bundles # apart, because user code can make no files beside what is hidden from it
      emptyDir: {sizeLimit: {{ $settings.cacheSize }}}
    {{- end }}
    {{- with $settings.sharedMemory }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ . }}}
    {{- end }}
    {{- if and (hasKey $about.mounts "store") (not $root.Values.store.url) }}
    - name: store
      persistentVolumeClaim: {claimName: {{ include "paceline.storeClaim" $root }}}
    {{- end }}
{{- end }}

{{/* One container: what podTemplate has, with about, grace and index. */}}
{{- define "paceline.container" -}}
{{- $root := .root -}}
{{- $settings := .settings -}}
{{- $about := .about -}}
{{- $fabric := $settings.fabric -}}
{{- $name := ternary .role (printf "%s-%d" .role .index) (eq (int $settings.containers) 1) -}}
{{- $port := add (include "paceline.mainPort" $about | int) .index -}}
{{- $isPage := eq .kind "page" -}}
- name: {{ $name }}
  image: {{ include "paceline.image" (dict "root" $root "role" .role "settings" $settings) | quote }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command: {{ splitList " " $about.command | toJson }}
  args:
    - --host=0.0.0.0
    - --port={{ $port }}
    {{- if not $isPage }}
    - --grace={{ .grace }}
    {{- end }}
    {{- if ne .kind "coordinator" }}
    - --coordinator={{ include "paceline.coordinator" $root }}
    {{- if not $isPage }}
    - --name={{ .name }}
    {{- end }}
    {{- if $settings.metricsPort }}
    - --metrics-port={{ add $settings.metricsPort .index }}
    {{- end }}
    {{- end }}
    {{- range $about.options }}
    - {{ . | quote }}
    {{- end }}
    {{- with $fabric.interface }}
    - --fabric={{ . }}
    {{- end }}
    {{- if $settings.httpPort }}
    - --http-port={{ add $settings.httpPort .index }}
    {{- end }}
    {{- range concat .args $settings.options }}
    - {{ . | quote }}
    {{- end }}
  env:
    {{- include "paceline.tlsEnv" $root | nindent 4 }}
    - {name: PACELINE_TOKEN_FILE, value: /token/token}
    {{- if include "paceline.storageKey" (dict "root" $root "kind" .kind) }}
    - {name: PACELINE_STORAGE_KEY_FILE, value: /storage-key/key}
    {{- else if and $root.Values.storageKey.secretName (not $isPage) }}
    - {name: PACELINE_ANSWER_CACHE_MB, value: "0"} # judges' answers stay in memory
    {{- end }}
    - {name: HOME, value: /tmp}
    - {name: XDG_CACHE_HOME, value: /cache}
    - {name: PACELINE_OWN_FOLDERS, value: "/tmp:/cache:/bundles"} # volumes of this pod, which no other user has
    {{- if has "code" $about.takes }}
    - {name: PACELINE_BUNDLE_CACHE, value: /bundles}
    {{- end }}
    - {name: HF_HOME, value: /cache/huggingface}
    - {name: TORCHINDUCTOR_CACHE_DIR, value: /cache/inductor}
    - {name: TRITON_CACHE_DIR, value: /cache/triton}
    {{- if eq .kind "learner" }}
    {{- if and (gt (int $settings.nodes) 1) (eq $settings.kind "StatefulSet") }}
    - name: NODE_RANK
      valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}
    {{- end }}
    {{- end }}
    {{- range $key, $value := include "paceline.fabricEnv" $fabric | fromYaml }}
    - {name: {{ $key }}, value: {{ $value | quote }}}
    {{- end }}
    {{- range $key, $value := $settings.env }}
    - {name: {{ $key }}, value: {{ $value | quote }}}
    {{- end }}
  {{- with compact (list (ternary "" $root.Values.store.credentialsSecret $isPage) $settings.envFromSecret) }}
  envFrom:
    {{- range . }}
    - secretRef: {name: {{ . }}}
    {{- end }}
  {{- end }}
  ports:
    {{- range $key, $number := $about.ports }}
    - {name: {{ ternary $key (printf "%s-%d" $key $.index) (eq $.index 0) }}, containerPort: {{ add $number $.index }}}
    {{- end }}
    {{- if $settings.httpPort }}
    - {name: {{ ternary "http" (printf "http-%d" .index) (eq .index 0) }}, containerPort: {{ add $settings.httpPort .index }}}
    {{- end }}
    {{- if eq .kind "coordinator" }}
    {{- if $root.Values.tls.secretName }}
    - {name: people, containerPort: {{ $root.Values.tls.peoplePort }}}
    {{- end }}
    {{- if $settings.metrics.enabled }}
    - {name: metrics, containerPort: {{ $settings.metrics.port }}}
    {{- end }}
    {{- else if $settings.metricsPort }}
    - {name: {{ ternary "metrics" (printf "metrics-%d" .index) (eq .index 0) }}, containerPort: {{ add $settings.metricsPort .index }}}
    {{- end }}
  {{- $silent := and (eq .kind "learner") (gt (int (get $settings "nodes" | default 1)) 1) }}
  {{- $main := dict "grpc" (dict "port" $port) }}
  {{- $ready := $main }}
  {{- if hasPrefix "/" $about.health }}
  {{- $main = dict "httpGet" (dict "path" $about.health "port" $port) }}
  {{- if $root.Values.tls.secretName }}{{- $_ := set $main.httpGet "scheme" "HTTPS" }}{{- end }}
  {{- $ready = $main }}
  {{- else if $root.Values.tls.secretName }}{{/* the kubelet's own gRPC probes know no TLS */}}
  {{- $check := list "python" "-m" "paceline.services.common.serving.healthcheck" (printf "127.0.0.1:%v" $port) "--timeout" "8" }}
  {{- $main = dict "exec" (dict "command" $check) }}
  {{- $ready = dict "exec" (dict "command" (ternary $check (concat $check (list "--service" $about.health)) (empty $about.health))) }}
  {{- else if $about.health }}
  {{- $ready = dict "grpc" (dict "port" $port "service" $about.health) }}
  {{- end }}
  {{- $isCommand := hasKey $main "exec" }}
  {{- if not $silent }}
  startupProbe: # libraries are imported, a ledger is recovered
    {{- toYaml $main | nindent 4 }}
    periodSeconds: {{ ternary 10 5 $isCommand }}
    {{- if $isCommand }}
    timeoutSeconds: 10
    {{- end }}
    failureThreshold: {{ ternary 60 120 $isCommand }}
  readinessProbe: # it can work on its run; a worker without a run or a coordinator is ready for one
    {{- toYaml $ready | nindent 4 }}
    periodSeconds: {{ ternary 30 10 $isCommand }}
    timeoutSeconds: {{ ternary 10 5 $isCommand }}
    failureThreshold: 3
  livenessProbe: # the process answers; a worker that waits for a coordinator is alive
    {{- toYaml $main | nindent 4 }}
    periodSeconds: {{ ternary 60 20 $isCommand }}
    timeoutSeconds: 10
    failureThreshold: 6
  {{- end }}
  {{- if $settings.preStopSeconds }}
  lifecycle:
    preStop: {sleep: {seconds: {{ $settings.preStopSeconds }}}}
  {{- end }}
  {{- $resources := deepCopy (get $settings "resources" | default dict) }}
  {{- range $where := list "requests" "limits" }}
  {{- $part := get $resources $where | default dict }}
  {{- if $settings.gpus }}{{- $_ := set $part $settings.gpuResource ($settings.gpus | toString) }}{{- end }}
  {{- if $fabric.devices }}{{- $_ := set $part (include "paceline.fabricResource" $fabric) ($fabric.devices | toString) }}{{- end }}
  {{- $_ := set $resources $where $part }}
  {{- end }}
  {{- if $settings.resourceClaims }}
  {{- $claims := list }}
  {{- range $settings.resourceClaims }}{{- $claims = append $claims (dict "name" (printf "%s-%d" .name $.index)) }}{{- end }}
  {{- $_ := set $resources "claims" $claims }}
  {{- end }}
  resources:
    {{- toYaml $resources | nindent 4 }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
      {{- if has $fabric.kind (list "infiniband" "roce") }}
      add: [IPC_LOCK] # registers memory with the adapter
      {{- end }}
  volumeMounts:
    - {name: token, mountPath: /token, readOnly: true}
    {{- if $root.Values.tls.secretName }}
    - {name: tls, mountPath: /tls, readOnly: true}
    {{- end }}
    {{- if include "paceline.storageKey" (dict "root" $root "kind" .kind) }}
    - {name: storage-key, mountPath: /storage-key, readOnly: true}
    {{- end }}
    - {name: tmp, mountPath: /tmp}
    - {name: cache, mountPath: /cache}
    {{- if has "code" $about.takes }}
    - {name: bundles, mountPath: /bundles}
    {{- end }}
    {{- if $settings.sharedMemory }}
    - {name: shm, mountPath: /dev/shm}
    {{- end }}
    {{- if eq (get $about.mounts "runs") "rw" }}
    - {name: runs, mountPath: /runs}
    {{- end }}
    {{- if and (hasKey $about.mounts "store") (not $root.Values.store.url) }}
    - {name: store, mountPath: /store{{ if eq $about.mounts.store "ro" }}, readOnly: true{{ end }}}
    {{- end }}
{{- end }}

{{/* Variables of a fast network for NCCL and libfabric. */}}
{{- define "paceline.fabricEnv" -}}
{{- $env := dict -}}
{{- if eq .kind "efa" -}}
{{- $_ := set $env "FI_PROVIDER" "efa" -}}
{{- $_ := set $env "FI_EFA_USE_DEVICE_RDMA" "1" -}}
{{- else if has .kind (list "infiniband" "roce") -}}
{{- with .hca }}{{- $_ := set $env "NCCL_IB_HCA" . -}}{{- end -}}
{{- if eq .kind "roce" }}{{- $_ := set $env "NCCL_IB_GID_INDEX" "3" -}}{{- end -}}
{{- end -}}
{{- with .interface }}{{- if not (contains "/" .) -}}{{- $_ := set $env "NCCL_SOCKET_IFNAME" . -}}{{- end -}}{{- end -}}
{{ toYaml $env }}
{{- end }}

{{- define "paceline.fabricResource" -}}
{{ .resource | default (ternary "vpc.amazonaws.com/efa" "rdma/hca" (eq .kind "efa")) }}
{{- end }}
