package csrpolicy

// Codes of reasons for which a request is left alone.
const (
	CodeOtherSigner   = "OtherSigner"    // not kubernetes.io/kubelet-serving
	CodeDecided       = "AlreadyDecided" // somebody has approved or denied it, or it was issued or failed
	CodeNodeUnmanaged = "NodeNotManaged" // the Node does not run Talos, or is not claimed by us
	CodeExpired       = "Abandoned"      // no kubelet waits for it any longer
)

// CodeVerified is that of the one reason for which a request is approved.
const CodeVerified = "IdentityVerified"

// Codes of reasons for which a request must wait.
const (
	CodeNodeUnknown         = "NodeUnknown"
	CodeMachineUnknown      = "MachineUnknown"
	CodeMachineUnreachable  = "MachineUnreachable"
	CodeMachineMismatch     = "IdentityMismatch"
	CodeClusterUnknown      = "ClusterIdentityIncomplete" // what is the cluster's own is not known in full
	CodeControlPlaneUnclear = "ControlPlaneUnconfirmed"   // the API server's, and Node and machine do not both say control plane
	CodeUnknownName         = "UnknownDNSName"            // the machine does not have that name
	CodeUnknownAddress      = "UnknownIPAddress"          // the machine does not have that address
	CodeExcludedAddress     = "ExcludedIPAddress"         // the machine has it and says that it is no node's
	CodeVirtualAddress      = "VirtualIPAddress"          // it is on a link for addresses that several machines have, and not the node IP
	CodeOwnedByOthers       = "OwnedByOtherMachine"
)

// Codes of reasons for which a request is denied.
const (
	CodeNoNode         = "RequesterNotNode"
	CodeGroups         = "InvalidGroups"
	CodeUsages         = "InvalidUsages"
	CodeExpiration     = "InvalidExpiration"
	CodeTooLarge       = "RequestTooLarge"
	CodeMalformed      = "MalformedRequest"
	CodeSubject        = "InvalidSubject"
	CodeKey            = "WeakKey"
	CodeSignature      = "BadSignature"
	CodeExtension      = "ForbiddenExtension" // an attribute or extension other than subjectAltName
	CodeNoSANs         = "NoSANs"
	CodeTooManySANs    = "TooManySANs"
	CodeForbiddenSAN   = "ForbiddenSANType" // neither a DNS name nor an address
	CodeWildcard       = "Wildcard"
	CodeInvalidName    = "InvalidDNSName"
	CodeAddressAsName  = "IPAddressAsDNSName"
	CodeClusterName    = "ClusterDNSName"
	CodeSpecialAddress = "SpecialIPAddress" // loopback, link-local, multicast, unspecified, broadcast
	CodeClusterAddress = "ClusterIPAddress"
	CodeOutdated       = "Outdated" // neither the machine nor the Node has it: the kubelet would ask for something else by now
)
