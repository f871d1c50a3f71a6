package prometheus_test

import (
	"slices"
	"time"
)

// healthy has the series of a healthy cluster of three control-plane machines and seven workers, scraped every minute for
// nine hours.
const healthy = `
up{job="talos-ccm", instance="a"} 1x540
up{job="talos-ccm", instance="b"} 1x540
up{job="talos-ccm", instance="c"} 1x540
process_start_time_seconds{job="talos-ccm", instance="a"} 100x540
leader_election_master_status{job="talos-ccm", instance="a", name="cloud-controller-manager-talos"} 1x540
leader_election_master_status{job="talos-ccm", instance="b", name="cloud-controller-manager-talos"} 0x540
leader_election_master_status{job="talos-ccm", instance="c", name="cloud-controller-manager-talos"} 0x540
talosccm_build_info{job="talos-ccm", instance="a", version="v1.0.0"} 1x540
talosccm_build_info{job="talos-ccm", instance="b", version="v1.0.0"} 1x540
talosccm_build_info{job="talos-ccm", instance="c", version="v1.0.0"} 1x540
talosccm_config_valid{job="talos-ccm", instance="a"} 1x540
talosccm_config_valid{job="talos-ccm", instance="b"} 1x540
talosccm_config_valid{job="talos-ccm", instance="c"} 1x540
talosccm_machines{job="talos-ccm", instance="a", condition="Current"} 10x540
talosccm_machines{job="talos-ccm", instance="a", condition="Unreachable"} 0x540
talosccm_machines{job="talos-ccm", instance="a", condition="Mismatch"} 0x540
talosccm_machines{job="talos-ccm", instance="a", condition="Unknown"} 0x540
talosccm_watch_restarts_total{job="talos-ccm", instance="a"} 0+0x540
talosccm_api_requests_total{job="talos-ccm", instance="a", method="List", code="OK"} 0+90x540
talosccm_api_requests_total{job="talos-ccm", instance="a", method="Watch", code="Canceled"} 0+4x540
talosccm_api_requests_total{job="talos-ccm", instance="a", method="Get", code="NotFound"} 0+4x540
talosccm_node_syncs_total{job="talos-ccm", instance="a", result="unchanged"} 0+10x540
talosccm_nodes_uninitialized{job="talos-ccm", instance="a"} 0x540
talosccm_nodes_uninitialized{job="talos-ccm", instance="b"} 0x540
talosccm_reconcile_errors_total{job="talos-ccm", instance="a", controller="cloud-node"} 3+0x540
talosccm_token_expiry_timestamp_seconds{job="talos-ccm", instance="a"} 3600+60x540
talosccm_token_expiry_timestamp_seconds{job="talos-ccm", instance="b"} 3600+60x540
talosccm_reader_certificate_expiry_timestamp_seconds{job="talos-ccm", instance="a"} 3600+60x540
workqueue_unfinished_work_seconds{job="talos-ccm", instance="a", name="cloud-node"} 0x540
talosccm_csr_pending{job="talos-ccm", instance="a"} 0x540
talosccm_csr_verdicts_total{job="talos-ccm", instance="a", decision="Approve", reason="IdentityVerified"} 0+1x540
talosccm_ipam_pool_blocks{job="talos-ccm", instance="a", pool="cluster", family="IPv4", cidr="10.244.0.0/16"} 256x540
talosccm_ipam_pool_blocks_free{job="talos-ccm", instance="a", pool="cluster", family="IPv4", cidr="10.244.0.0/16"} 246x540
talosccm_ipam_blocked{job="talos-ccm", instance="a"} 0x540
talosccm_ipam_blocked{job="talos-ccm", instance="b"} 0x540
rest_client_requests_total{job="talos-ccm", instance="a", code="200", method="GET", host="h"} 0+60x540
rest_client_requests_total{job="talos-ccm", instance="a", code="409", method="PATCH", host="h"} 0+60x540
process_resident_memory_bytes{job="talos-ccm", instance="a"} 9e7x540
go_gc_gomemlimit_bytes{job="talos-ccm", instance="a"} 536870912x540
process_open_fds{job="talos-ccm", instance="a"} 50x540
process_max_fds{job="talos-ccm", instance="a"} 524288x540
up{job="another", instance="a"} 0x540
leader_election_master_status{job="another", instance="a", name="other"} 1x540
`

// scene is a cluster with a problem. Its series override the series in healthy that have the same name and labels.
type scene struct {
	name   string
	series string
	// at is when it is looked at, after the start, and wanted are all alerts that fire then.
	at     time.Duration
	wanted []string
	// near are the alerts that it comes close to.
	near []string
}

func scenes() []scene {
	return slices.Concat(availability, configuration, machines, nodes, certificates, podCIDRs, credentials, resources)
}

var availability = []scene{
	{
		name: "no instance answers", at: 11 * time.Minute, wanted: []string{"TalosCCMAbsent"}, near: []string{"TalosCCMDown"},
		series: `
up{job="talos-ccm", instance="a"} 0x20
up{job="talos-ccm", instance="b"} 0x20
up{job="talos-ccm", instance="c"} 0x20
leader_election_master_status{job="talos-ccm", instance="a", name="cloud-controller-manager-talos"} _x20
`,
	},
	{
		name: "nothing is scraped", at: 16 * time.Minute, wanted: []string{"TalosCCMAbsent"},
		series: `
up{job="talos-ccm", instance="a"} _x20
up{job="talos-ccm", instance="b"} _x20
up{job="talos-ccm", instance="c"} _x20
`,
	},
	{name: "one of three answers", at: time.Hour, wanted: []string{"TalosCCMDown", "TalosCCMDown"}, near: []string{"TalosCCMAbsent"}, series: `
up{job="talos-ccm", instance="b"} 0x540
up{job="talos-ccm", instance="c"} 0x540
`},
	{name: "it has not answered for a short time", at: 20 * time.Minute, near: []string{"TalosCCMDown"}, series: `up{job="talos-ccm", instance="b"} 1x5 0x14 1x500`},
	{
		name: "it starts every ten minutes", at: time.Hour, wanted: []string{"TalosCCMRestarts"},
		series: `process_start_time_seconds{job="talos-ccm", instance="a"} 1x9 2x9 3x9 4x9 5x9 6x9 7x9`,
	},
	{
		name: "it was restarted twice", at: time.Hour, near: []string{"TalosCCMRestarts"},
		series: `process_start_time_seconds{job="talos-ccm", instance="a"} 1x9 2x9 3x500`,
	},
	{
		name: "the lease has no holder", at: 6 * time.Minute, wanted: []string{"TalosCCMNoLeader"},
		series: `leader_election_master_status{job="talos-ccm", instance="a", name="cloud-controller-manager-talos"} 0x540`,
	},
	{
		name: "no candidate for the lease", at: 6 * time.Minute, wanted: []string{"TalosCCMNoLeader"},
		series: `
leader_election_master_status{job="talos-ccm", instance="a", name="cloud-controller-manager-talos"} _x540
leader_election_master_status{job="talos-ccm", instance="b", name="cloud-controller-manager-talos"} _x540
leader_election_master_status{job="talos-ccm", instance="c", name="cloud-controller-manager-talos"} _x540
`,
	},
	{
		name: "the lease is handed over, in four minutes", at: 10 * time.Minute, near: []string{"TalosCCMNoLeader", "TalosCCMTwoLeaders"},
		series: `
leader_election_master_status{job="talos-ccm", instance="a", name="cloud-controller-manager-talos"} 1x5 0x500
leader_election_master_status{job="talos-ccm", instance="b", name="cloud-controller-manager-talos"} 0x9 1x500
`,
	},
	{
		name: "two lead", at: 6 * time.Minute, wanted: []string{"TalosCCMTwoLeaders"},
		series: `leader_election_master_status{job="talos-ccm", instance="b", name="cloud-controller-manager-talos"} 1x540`,
	},
	{
		name: "an upgrade was given up", at: 6*time.Hour + time.Minute, wanted: []string{"TalosCCMVersionsDiffer"},
		series: `talosccm_build_info{job="talos-ccm", instance="c", version="v1.0.0"} _x540
talosccm_build_info{job="talos-ccm", instance="c", version="v1.1.0"} 1x540`,
	},
	{
		name: "an upgrade takes five hours", at: 5 * time.Hour, near: []string{"TalosCCMVersionsDiffer"},
		series: `talosccm_build_info{job="talos-ccm", instance="c", version="v1.0.0"} _x540
talosccm_build_info{job="talos-ccm", instance="c", version="v1.1.0"} 1x540`,
	},
}

var configuration = []scene{
	{name: "a bad configuration", at: 6 * time.Minute, wanted: []string{"TalosCCMConfigInvalid"}, series: `talosccm_config_valid{job="talos-ccm", instance="b"} 0x540`},
	{name: "a bad configuration that is soon mended", at: 10 * time.Minute, near: []string{"TalosCCMConfigInvalid"}, series: `talosccm_config_valid{job="talos-ccm", instance="b"} 1x5 0x3 1x500`},
	{
		name: "the first value that is left out", at: 2 * time.Hour, wanted: []string{"TalosCCMValuesSkipped"},
		series: `talosccm_transformer_errors_total{job="talos-ccm", instance="a", type="labels"} _x100 1x400`,
	},
	{
		name: "one more value that is left out", at: 2 * time.Hour, wanted: []string{"TalosCCMValuesSkipped"},
		series: `talosccm_transformer_errors_total{job="talos-ccm", instance="a", type="taints"} 2x100 3x400`,
	},
	{
		name: "a value that was left out hours ago", at: 4 * time.Hour, near: []string{"TalosCCMValuesSkipped"},
		series: `talosccm_transformer_errors_total{job="talos-ccm", instance="a", type="labels"} _x100 1x400`,
	},
}

var machines = []scene{
	{
		name: "a machine does not answer", at: 16 * time.Minute, wanted: []string{"TalosCCMMachinesUnreachable"}, near: []string{"TalosCCMMostMachinesUnreachable"},
		series: `talosccm_machines{job="talos-ccm", instance="a", condition="Unreachable"} 1x540`,
	},
	{
		name: "a machine reboots", at: 16 * time.Minute, near: []string{"TalosCCMMachinesUnreachable"},
		series: `talosccm_machines{job="talos-ccm", instance="a", condition="Unreachable"} 0x3 1x8 0x500`,
	},
	{
		name: "most machines do not answer", at: 6 * time.Minute, wanted: []string{"TalosCCMMostMachinesUnreachable"},
		series: `
talosccm_machines{job="talos-ccm", instance="a", condition="Current"} 4x540
talosccm_machines{job="talos-ccm", instance="a", condition="Unreachable"} 6x540
`,
	},
	{
		name: "another machine answers", at: 16 * time.Minute, wanted: []string{"TalosCCMMachineMismatch"},
		series: `talosccm_machines{job="talos-ccm", instance="a", condition="Mismatch"} 1x540`,
	},
	{
		name: "another machine answers for a while", at: 16 * time.Minute, near: []string{"TalosCCMMachineMismatch"},
		series: `talosccm_machines{job="talos-ccm", instance="a", condition="Mismatch"} 1x10 0x500`,
	},
	{
		name: "the watches of each machine end every five minutes", at: time.Hour, wanted: []string{"TalosCCMWatchesBreak"},
		series: `talosccm_watch_restarts_total{job="talos-ccm", instance="a"} 0+2x540`,
	},
	{
		name: "the watches of all machines end once", at: time.Hour, near: []string{"TalosCCMWatchesBreak"},
		series: `talosccm_watch_restarts_total{job="talos-ccm", instance="a"} 0x40 10x500`,
	},
	{
		name: "machines are short of memory for an answer", at: 40 * time.Minute, wanted: []string{"TalosCCMTalosAPIErrors"},
		series: `talosccm_api_requests_total{job="talos-ccm", instance="a", method="List", code="ResourceExhausted"} 0+1x540`,
	},
	{
		name: "a machine is not reached, and another has not all kinds", at: 40 * time.Minute, near: []string{"TalosCCMTalosAPIErrors"},
		series: `
talosccm_api_requests_total{job="talos-ccm", instance="a", method="List", code="Unavailable"} 0+1x540
talosccm_api_requests_total{job="talos-ccm", instance="a", method="Watch", code="DeadlineExceeded"} 0+1x540
talosccm_api_requests_total{job="talos-ccm", instance="a", method="List", code="PermissionDenied"} 0+1x540
`,
	},
}

var nodes = []scene{
	{
		name: "a Node is not initialized", at: 16 * time.Minute, wanted: []string{"TalosCCMNodesUninitialized"},
		series: `talosccm_nodes_uninitialized{job="talos-ccm", instance="a"} 1x540`,
	},
	{
		name: "Nodes come one after the other", at: 16 * time.Minute, near: []string{"TalosCCMNodesUninitialized"},
		series: `talosccm_nodes_uninitialized{job="talos-ccm", instance="a"} 1x5 0x0 2x500`,
	},
	{
		name: "requests cannot be decided", at: 30 * time.Minute, wanted: []string{"TalosCCMSyncsFail"},
		series: `talosccm_reconcile_errors_total{job="talos-ccm", instance="a", controller="node-csr-approval"} 0+1x540`,
	},
	{
		name: "a Node could not be written for a moment", at: 30 * time.Minute, near: []string{"TalosCCMSyncsFail"},
		series: `talosccm_reconcile_errors_total{job="talos-ccm", instance="a", controller="cloud-node"} 0x10 4x500`,
	},
	{
		name: "a controller hangs", at: 10 * time.Minute, wanted: []string{"TalosCCMWorkHangs"},
		series: `workqueue_unfinished_work_seconds{job="talos-ccm", instance="a", name="cloud-node"} 0+60x540`,
	},
	{
		name: "a controller takes a minute, and a queue of the framework's waits", at: 10 * time.Minute, near: []string{"TalosCCMWorkHangs"},
		series: `
workqueue_unfinished_work_seconds{job="talos-ccm", instance="a", name="cloud-node"} 60x540
workqueue_unfinished_work_seconds{job="talos-ccm", instance="a", name="DynamicServingCertificateController"} 0+60x540
`,
	},
}

var certificates = []scene{
	{name: "a request waits", at: 21 * time.Minute, wanted: []string{"TalosCCMCertificateRequestsWait"}, series: `talosccm_csr_pending{job="talos-ccm", instance="a"} 1x540`},
	{name: "a request waits for a machine to boot", at: 21 * time.Minute, near: []string{"TalosCCMCertificateRequestsWait"}, series: `talosccm_csr_pending{job="talos-ccm", instance="a"} 1x15 0x500`},
	{
		name: "the first request that is denied", at: 2 * time.Hour, wanted: []string{"TalosCCMCertificateRequestsDenied"},
		series: `talosccm_csr_verdicts_total{job="talos-ccm", instance="a", decision="Deny", reason="ClusterDNSName"} _x100 1x400`,
	},
	{
		name: "one more request is denied", at: 2 * time.Hour, wanted: []string{"TalosCCMCertificateRequestsDenied"},
		series: `talosccm_csr_verdicts_total{job="talos-ccm", instance="a", decision="Deny", reason="Wildcard"} 2x100 3x400`,
	},
	{
		name: "requests were denied hours ago, one was overtaken, another waits for its machine", at: 4 * time.Hour,
		near: []string{"TalosCCMCertificateRequestsDenied", "TalosCCMCertificateClaimedByOthers"},
		series: `
talosccm_csr_verdicts_total{job="talos-ccm", instance="a", decision="Deny", reason="Wildcard"} _x100 2x400
talosccm_csr_verdicts_total{job="talos-ccm", instance="a", decision="Defer", reason="OwnedByOtherMachine"} _x100 1x400
talosccm_csr_verdicts_total{job="talos-ccm", instance="a", decision="Deny", reason="NotOwned"} _x220 1x300
talosccm_csr_verdicts_total{job="talos-ccm", instance="a", decision="Defer", reason="MachineUnknown"} _x220 1x300
`,
	},
	{
		name: "a machine requests only what neither it nor its Node has", at: 90 * time.Minute, wanted: []string{"TalosCCMCertificateRequestsNotOwned"},
		series: `talosccm_csr_verdicts_total{job="talos-ccm", instance="a", decision="Deny", reason="NotOwned"} 0+1x540`,
	},
	{
		name: "a kubelet does so until it reports its status", at: 90 * time.Minute, near: []string{"TalosCCMCertificateRequestsNotOwned"},
		series: `talosccm_csr_verdicts_total{job="talos-ccm", instance="a", decision="Deny", reason="NotOwned"} 0x60 1+1x15 16x400`,
	},
	{
		name: "a CSR contains a name of another machine", at: 2 * time.Hour, wanted: []string{"TalosCCMCertificateClaimedByOthers"},
		series: `talosccm_csr_verdicts_total{job="talos-ccm", instance="a", decision="Defer", reason="OwnedByOtherMachine"} _x100 1x400`,
	},
	{
		name: "and again", at: 2 * time.Hour, wanted: []string{"TalosCCMCertificateClaimedByOthers"},
		series: `talosccm_csr_verdicts_total{job="talos-ccm", instance="a", decision="Defer", reason="OwnedByOtherMachine"} 1x100 2x400`,
	},
	{
		name: "a request with an unexpected client certificate", at: 2 * time.Hour, wanted: []string{"TalosCCMUnexpectedCredential"},
		series: `talosccm_csr_unexpected_credentials_total{job="talos-ccm", instance="a"} 0x100 1x400`,
	},
	{
		name: "one was hours ago", at: 4 * time.Hour, near: []string{"TalosCCMUnexpectedCredential"},
		series: `talosccm_csr_unexpected_credentials_total{job="talos-ccm", instance="a"} 0x100 1x900`,
	},
}

var podCIDRs = []scene{
	{
		name: "few blocks are free", at: 11 * time.Minute, wanted: []string{"TalosCCMPodCIDRsRunOut"},
		series: `talosccm_ipam_pool_blocks_free{job="talos-ccm", instance="a", pool="cluster", family="IPv4", cidr="10.244.0.0/16"} 25x540`,
	},
	{
		name: "one CIDR of two is exhausted, and so is a machine's own prefix", at: 11 * time.Minute, near: []string{"TalosCCMPodCIDRsRunOut"},
		series: `
talosccm_ipam_pool_blocks_free{job="talos-ccm", instance="a", pool="cluster", family="IPv4", cidr="10.244.0.0/16"} 0x540
talosccm_ipam_pool_blocks{job="talos-ccm", instance="a", pool="cluster", family="IPv4", cidr="10.245.0.0/16"} 256x540
talosccm_ipam_pool_blocks_free{job="talos-ccm", instance="a", pool="cluster", family="IPv4", cidr="10.245.0.0/16"} 200x540
talosccm_ipam_pool_blocks{job="talos-ccm", instance="a", pool="machine", family="IPv6", cidr="2001:db8::/119"} 2x540
talosccm_ipam_pool_blocks_free{job="talos-ccm", instance="a", pool="machine", family="IPv6", cidr="2001:db8::/119"} 0x540
`,
	},
	{
		name: "a Node has no podCIDRs", at: 11 * time.Minute, wanted: []string{"TalosCCMNodesWithoutPodCIDRs"}, near: []string{"TalosCCMPodCIDRsOverlap"},
		series: `talosccm_ipam_affected_nodes{job="talos-ccm", instance="a", reason="PodCIDRPoolExhausted"} 1x540`,
	},
	{
		name: "a Node waited for its podCIDRs", at: 11 * time.Minute, near: []string{"TalosCCMNodesWithoutPodCIDRs"},
		series: `talosccm_ipam_affected_nodes{job="talos-ccm", instance="a", reason="PodCIDRMachineUnavailable"} 1x5 _x500`,
	},
	{
		name: "two Nodes overlap", at: 2 * time.Minute, wanted: []string{"TalosCCMPodCIDRsOverlap"}, near: []string{"TalosCCMNodesWithoutPodCIDRs"},
		series: `talosccm_ipam_affected_nodes{job="talos-ccm", instance="a", reason="PodCIDROverlap"} 2x540`,
	},
	{
		name: "another allocator is active", at: 11 * time.Minute, wanted: []string{"TalosCCMAllocatorConflict"},
		series: `talosccm_ipam_blocked{job="talos-ccm", instance="a"} 1x540`,
	},
	{
		name: "a new leader looks around first", at: 11 * time.Minute, near: []string{"TalosCCMAllocatorConflict"},
		series: `talosccm_ipam_blocked{job="talos-ccm", instance="a"} 1x2 0x500`,
	},
}

var credentials = []scene{
	{
		name: "the certificate is not renewed", at: 46 * time.Minute, wanted: []string{"TalosCCMReaderCertificateExpires"}, near: []string{"TalosCCMTokenExpires"},
		series: `talosccm_reader_certificate_expiry_timestamp_seconds{job="talos-ccm", instance="a"} 3600x540`,
	},
	{
		name: "the token is not renewed", at: 46 * time.Minute, wanted: []string{"TalosCCMTokenExpires"}, near: []string{"TalosCCMReaderCertificateExpires"},
		series: `talosccm_token_expiry_timestamp_seconds{job="talos-ccm", instance="b"} 3600x540`,
	},
	{
		name: "both are renewed when they should be", at: 80 * time.Minute, near: []string{"TalosCCMTokenExpires", "TalosCCMReaderCertificateExpires"},
		series: `
talosccm_reader_certificate_expiry_timestamp_seconds{job="talos-ccm", instance="a"} 3600x30 5400x30 7200x30
talosccm_token_expiry_timestamp_seconds{job="talos-ccm", instance="a"} 3600x10 4200x10 4800x10 5400x10 6000x10 6600x10 7200x10 7800x10 8400x10
`,
	},
	{
		name: "a pod, which has none of its own making", at: 30 * time.Minute, near: []string{"TalosCCMTokenExpires", "TalosCCMReaderCertificateExpires"},
		series: `
talosccm_reader_certificate_expiry_timestamp_seconds{job="talos-ccm", instance="a"} 0x540
talosccm_token_expiry_timestamp_seconds{job="talos-ccm", instance="a"} 0x540
`,
	},
}

var resources = []scene{
	{
		name: "the API server refuses", at: 30 * time.Minute, wanted: []string{"TalosCCMKubernetesAPIErrors"},
		series: `rest_client_requests_total{job="talos-ccm", instance="a", code="403", method="PATCH", host="h"} 0+30x540`,
	},
	{
		name: "the API server is not reached", at: 30 * time.Minute, wanted: []string{"TalosCCMKubernetesAPIErrors"},
		series: `rest_client_requests_total{job="talos-ccm", instance="a", code="<error>", method="GET", host="h"} 0+30x540`,
	},
	{
		name: "one request in twenty fails", at: 30 * time.Minute, near: []string{"TalosCCMKubernetesAPIErrors"},
		series: `rest_client_requests_total{job="talos-ccm", instance="a", code="500", method="GET", host="h"} 0+6x540`,
	},
	{
		name: "memory near its limit", at: 16 * time.Minute, wanted: []string{"TalosCCMMemoryHigh"},
		series: `process_resident_memory_bytes{job="talos-ccm", instance="a"} 5e8x540`,
	},
	{
		name: "much memory, and an instance without a limit", at: 16 * time.Minute, near: []string{"TalosCCMMemoryHigh"},
		series: `
process_resident_memory_bytes{job="talos-ccm", instance="a"} 4.5e8x540
process_resident_memory_bytes{job="talos-ccm", instance="b"} 9e9x540
go_gc_gomemlimit_bytes{job="talos-ccm", instance="b"} 9223372036854775807x540
`,
	},
	{name: "many open files", at: 16 * time.Minute, wanted: []string{"TalosCCMOpenFilesHigh"}, series: `process_open_fds{job="talos-ccm", instance="a"} 450000x540`},
	{name: "some open files", at: 16 * time.Minute, near: []string{"TalosCCMOpenFilesHigh"}, series: `process_open_fds{job="talos-ccm", instance="a"} 400000x540`},
}
