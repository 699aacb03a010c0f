{{/* Metadata and spec, without containers, of a pod that runs commands: the root. */}}
{{- define "paceline.cliPod" -}}
metadata:
  labels:
    {{- include "paceline.labels" (dict "root" . "role" "cli") | nindent 4 }}
spec:
  restartPolicy: Never
  serviceAccountName: {{ include "paceline.name" . }}-cli
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with .Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  volumes:
    - name: token
      secret:
        secretName: {{ include "paceline.tokenSecret" . }}
        defaultMode: 0440
        items: [{key: {{ .Values.token.key }}, path: token}]
    {{- with .Values.tls.secretName }}
    - name: tls # the authority alone: commands have the token and no certificate
      secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: ca.crt, path: ca.crt}]}
    {{- end }}
    - name: tmp
      emptyDir: {}
{{- end }}

{{/* A container that runs a command: dict root, name, command, and image or role. */}}
{{- define "paceline.cliContainer" -}}
{{- $root := .root -}}
name: {{ .name }}
image: {{ .image | default (include "paceline.image" (dict "root" $root "role" (.role | default "cli") "settings" $root.Values.defaults)) | quote }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
command:
  {{- toYaml .command | nindent 2 }}
env:
  - {name: PACELINE_COORDINATOR, value: {{ include "paceline.people" $root | quote }}}
  {{- include "paceline.tlsEnv" $root | nindent 2 }}
  - {name: PACELINE_TOKEN_FILE, value: /token/token}
  - {name: HOME, value: /tmp}
  - {name: XDG_CACHE_HOME, value: /tmp}
  - {name: PACELINE_OWN_FOLDERS, value: /tmp} # a volume of this pod, which no other user has
{{- with $root.Values.store.credentialsSecret }}
envFrom:
  - secretRef: {name: {{ . }}}
{{- end }}
resources:
  requests: {cpu: 100m, memory: 1Gi}
  limits: {memory: 2Gi}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: token, mountPath: /token, readOnly: true}
  {{- if $root.Values.tls.secretName }}
  - {name: tls, mountPath: /tls, readOnly: true}
  {{- end }}
  - {name: tmp, mountPath: /tmp}
{{- end }}
