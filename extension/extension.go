// Package extension embeds the files of the Talos system extension.
//
// Talos waits for every extension service before the boot is complete. So the service spec depends only on the path of
// machine.sock, and all other waiting happens in the process. "restart: always" starts the service again after a lost
// lease.
package extension

import _ "embed"

// Name is the name of the extension and of its service, which Talos runs as "ext-talos-ccm".
const Name = "talos-ccm"

// RBAC is a stream of YAML documents with the ServiceAccount of talos-ccm and its permissions.
//
//go:embed rbac.yaml
var RBAC []byte

// ControllerLabel marks the objects of RBAC that are not always needed. Its value is the name of the controller that
// needs the object, or `secure-port`.
const ControllerLabel = "talos-ccm.dev/controller"

// SecurePort is the value of ControllerLabel for objects that are needed while the secure port is served.
const SecurePort = "secure-port"

// RBACVersionAnnotation is the version of an object of RBAC, a positive integer.
//
// An instance of talos-ccm neither changes nor deletes objects of a higher version than its own.
const RBACVersionAnnotation = "talos-ccm.dev/rbac-version"

// ServiceAccount and Namespace identify the ServiceAccount in RBAC.
const (
	ServiceAccount = "talos-ccm"
	Namespace      = "kube-system"
)

// Spec is the extension service spec, which Talos reads from /usr/local/etc/containers.
//
//go:embed talos-ccm.yaml
var Spec []byte
