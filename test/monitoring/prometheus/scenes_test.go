package prometheus_test

import (
	"slices"
	"time"
)

// healthy has the series of a healthy cluster of three control-plane machines and seven workers, scraped every minute for
// nine hours. Series of the instances a, b and c are written without the labels of their target, as up{abc}.
const healthy = `
up{abc} 1x540
process_start_time_seconds{a} 100x540
leader_election_master_status{a, name=lease} 1x540
leader_election_master_status{bc, name=lease} 0x540
talosccm_build_info{abc, version="v1.0.0"} 1x540
talosccm_config_info{abc, hash="1"} 1x540
talosccm_config_valid{abc} 1x540
talosccm_machines{a, condition="Current"} 10x540
talosccm_machine_up{a, node="w1"} 1x540
talosccm_machine_stage{a, node="w1", stage="running"} 1x540
talosccm_machine_unmet_conditions{a, node="w1"} 0x540
talosccm_machines{a, condition="Unreachable"} 0x540
talosccm_machines{a, condition="Mismatch"} 0x540
talosccm_machines{a, condition="Unknown"} 0x540
talosccm_watch_restarts_total{a} 0+0x540
talosccm_api_requests_total{a, method="List", code="OK"} 0+90x540
talosccm_api_requests_total{a, method="Watch", code="Canceled"} 0+4x540
talosccm_api_requests_total{a, method="Get", code="NotFound"} 0+4x540
talosccm_nodes_uninitialized{ab} 0x540
talosccm_reconcile_errors_total{a, controller="cloud-node"} 3+0x540
talosccm_token_expiry_timestamp_seconds{ab} 3600+60x540
talosccm_reader_certificate_expiry_timestamp_seconds{a} 3600+60x540
workqueue_unfinished_work_seconds{a, name="cloud-node"} 0x540
talosccm_csr_pending{a} 0x540
talosccm_csr_verdicts_total{a, decision="Approve", reason="IdentityVerified"} 0+1x540
talosccm_ipam_pool_blocks{a, pool="cluster", family="IPv4", cidr="10.244.0.0/16"} 256x540
talosccm_ipam_pool_blocks_free{a, pool="cluster", family="IPv4", cidr="10.244.0.0/16"} 246x540
talosccm_ipam_blocked{ab} 0x540
rest_client_requests_total{a, code="200", method="GET", host="h"} 0+60x540
rest_client_requests_total{a, code="409", method="PATCH", host="h"} 0+60x540
process_resident_memory_bytes{a} 9e7x540
go_gc_gomemlimit_bytes{a} 536870912x540
process_open_fds{a} 50x540
process_max_fds{a} 524288x540
up{job="another", instance="a"} 0x540
leader_election_master_status{job="another", instance="a", name="other"} 1x540
`

// scene is a cluster with a problem. Its series override the series in healthy that have the same name and labels.
type scene struct {
	name string
	at   time.Duration // after the start
	// fires are the alerts that fire then, and near are alerts that come close to it; separated by spaces.
	fires, near string
	series      string
}

func scenes() []scene {
	return slices.Concat(availability, configuration, machines, nodes, certificates, podCIDRs, credentials, resources)
}

var availability = []scene{
	{"no instance answers", 11 * time.Minute, "TalosCCMAbsent", "TalosCCMDown", `
up{abc} 0x20
leader_election_master_status{a, name=lease} _x20`},
	{"nothing is scraped", 16 * time.Minute, "TalosCCMAbsent", "", `up{abc} _x20`},
	{"one of three answers", time.Hour, "TalosCCMDown TalosCCMDown", "TalosCCMAbsent", `up{bc} 0x540`},
	{"it has not answered for a short time", 20 * time.Minute, "", "TalosCCMDown", `up{b} 1x5 0x14 1x500`},
	{"it starts every ten minutes", time.Hour, "TalosCCMRestarts", "", `process_start_time_seconds{a} 1x9 2x9 3x9 4x9 5x9 6x9 7x9`},
	{"it was restarted twice", time.Hour, "", "TalosCCMRestarts", `process_start_time_seconds{a} 1x9 2x9 3x500`},
	{"the lease has no holder", 6 * time.Minute, "TalosCCMNoLeader", "", `leader_election_master_status{a, name=lease} 0x540`},
	{"no candidate for the lease", 6 * time.Minute, "TalosCCMNoLeader", "", `leader_election_master_status{abc, name=lease} _x540`},
	{"the lease is handed over, in four minutes", 10 * time.Minute, "", "TalosCCMNoLeader TalosCCMTwoLeaders", `
leader_election_master_status{a, name=lease} 1x5 0x500
leader_election_master_status{b, name=lease} 0x9 1x500`},
	{"two lead", 6 * time.Minute, "TalosCCMTwoLeaders", "", `leader_election_master_status{b, name=lease} 1x540`},
	{"an upgrade was given up", 6*time.Hour + time.Minute, "TalosCCMVersionsDiffer", "", `
talosccm_build_info{c, version="v1.0.0"} _x540
talosccm_build_info{c, version="v1.1.0"} 1x540`},
	{"an upgrade takes five hours", 5 * time.Hour, "", "TalosCCMVersionsDiffer", `
talosccm_build_info{c, version="v1.0.0"} _x540
talosccm_build_info{c, version="v1.1.0"} 1x540`},
}

var configuration = []scene{
	{"a bad configuration", 6 * time.Minute, "TalosCCMConfigInvalid", "", `talosccm_config_valid{b} 0x540`},
	{"a different configuration", 31 * time.Minute, "TalosCCMConfigsDiffer", "", `
talosccm_config_info{b, hash="1"} _x540
talosccm_config_info{b, hash="2"} 1x540`},
	{"a configuration that is applied within 20 minutes", 40 * time.Minute, "", "TalosCCMConfigsDiffer", `
talosccm_config_info{b, hash="1"} _x20 1x500
talosccm_config_info{b, hash="2"} 1x19 _x500`},
	{"a bad configuration that is soon mended", 10 * time.Minute, "", "TalosCCMConfigInvalid", `talosccm_config_valid{b} 1x5 0x3 1x500`},
	{"the first value that is left out", 2 * time.Hour, "TalosCCMValuesSkipped", "", `talosccm_transformer_errors_total{a, type="labels"} _x100 1x400`},
	{"one more value that is left out", 2 * time.Hour, "TalosCCMValuesSkipped", "", `talosccm_transformer_errors_total{a, type="taints"} 2x100 3x400`},
	{"a value that was left out hours ago", 4 * time.Hour, "", "TalosCCMValuesSkipped", `talosccm_transformer_errors_total{a, type="labels"} _x100 1x400`},
}

var machines = []scene{
	{"a machine does not answer", 16 * time.Minute, "TalosCCMMachinesUnreachable", "TalosCCMMostMachinesUnreachable", `
talosccm_machines{a, condition="Unreachable"} 1x540`},
	{"a machine reboots", 16 * time.Minute, "", "TalosCCMMachinesUnreachable", `talosccm_machines{a, condition="Unreachable"} 0x3 1x8 0x500`},
	{"most machines do not answer", 6 * time.Minute, "TalosCCMMostMachinesUnreachable", "", `
talosccm_machines{a, condition="Current"} 4x540
talosccm_machines{a, condition="Unreachable"} 6x540`},
	{"a machine does not finish its upgrade", time.Hour, "TalosCCMMachineStageLasts", "", `
talosccm_machine_stage{a, node="w1", stage="running"} 1x10
talosccm_machine_stage{a, node="w1", stage="upgrading"} _x10 1x500`},
	{"a machine upgrades for twenty minutes", 25 * time.Minute, "", "TalosCCMMachineStageLasts", `
talosccm_machine_stage{a, node="w1", stage="upgrading"} _x3 1x20`},
	{"a machine is switched off", time.Hour, "", "TalosCCMMachineStageLasts TalosCCMMachinesNotReady", `
talosccm_machine_up{a, node="w1"} 1x10 0x500
talosccm_machine_unmet_conditions{a, node="w1"} 0x9 1x500
talosccm_machine_stage{a, node="w1", stage="running"} 1x10
talosccm_machine_stage{a, node="w1", stage="shutting down"} _x10 1x500`},
	{"a service of a machine is not healthy", 20 * time.Minute, "TalosCCMMachinesNotReady", "", `talosccm_machine_unmet_conditions{a, node="w1"} 1x540`},
	{"another machine answers", 16 * time.Minute, "TalosCCMMachineMismatch", "", `talosccm_machines{a, condition="Mismatch"} 1x540`},
	{"another machine answers for a while", 16 * time.Minute, "", "TalosCCMMachineMismatch", `talosccm_machines{a, condition="Mismatch"} 1x10 0x500`},
	{"the watches of each machine end every five minutes", time.Hour, "TalosCCMWatchesBreak", "", `talosccm_watch_restarts_total{a} 0+2x540`},
	{"the watches of all machines end once", time.Hour, "", "TalosCCMWatchesBreak", `talosccm_watch_restarts_total{a} 0x40 10x500`},
	{"machines are short of memory for an answer", 40 * time.Minute, "TalosCCMTalosAPIErrors", "", `
talosccm_api_requests_total{a, method="List", code="ResourceExhausted"} 0+1x540`},
	{"a machine is not reached, and another has not all kinds", 40 * time.Minute, "", "TalosCCMTalosAPIErrors", `
talosccm_api_requests_total{a, method="List", code="Unavailable"} 0+1x540
talosccm_api_requests_total{a, method="Watch", code="DeadlineExceeded"} 0+1x540
talosccm_api_requests_total{a, method="List", code="PermissionDenied"} 0+1x540`},
}

var nodes = []scene{
	{"a Node is not initialized", 16 * time.Minute, "TalosCCMNodesUninitialized", "", `talosccm_nodes_uninitialized{a} 1x540`},
	{"Nodes come one after the other", 16 * time.Minute, "", "TalosCCMNodesUninitialized", `talosccm_nodes_uninitialized{a} 1x5 0x0 2x500`},
	{"requests cannot be decided", 30 * time.Minute, "TalosCCMSyncsFail", "", `talosccm_reconcile_errors_total{a, controller="node-csr-approval"} 0+1x540`},
	{"a Node could not be written for a moment", 30 * time.Minute, "", "TalosCCMSyncsFail", `
talosccm_reconcile_errors_total{a, controller="cloud-node"} 0x10 4x500`},
	{"a controller hangs", 10 * time.Minute, "TalosCCMWorkHangs", "", `workqueue_unfinished_work_seconds{a, name="cloud-node"} 0+60x540`},
	{"a controller takes a minute, and a queue of the framework's waits", 10 * time.Minute, "", "TalosCCMWorkHangs", `
workqueue_unfinished_work_seconds{a, name="cloud-node"} 60x540
workqueue_unfinished_work_seconds{a, name="DynamicServingCertificateController"} 0+60x540`},
}

var certificates = []scene{
	{"a request waits", 21 * time.Minute, "TalosCCMCertificateRequestsWait", "", `talosccm_csr_pending{a} 1x540`},
	{"a request waits for a machine to boot", 21 * time.Minute, "", "TalosCCMCertificateRequestsWait", `talosccm_csr_pending{a} 1x15 0x500`},
	{"the first request that is denied", 2 * time.Hour, "TalosCCMCertificateRequestsDenied", "", `
talosccm_csr_verdicts_total{a, decision="Deny", reason="ClusterDNSName"} _x100 1x400`},
	{"one more request is denied", 2 * time.Hour, "TalosCCMCertificateRequestsDenied", "", `
talosccm_csr_verdicts_total{a, decision="Deny", reason="Wildcard"} 2x100 3x400`},
	{"requests were denied hours ago, one was overtaken, another waits for its machine", 4 * time.Hour, "", "TalosCCMCertificateRequestsDenied TalosCCMCertificateClaimedByOthers", `
talosccm_csr_verdicts_total{a, decision="Deny", reason="Wildcard"} _x100 2x400
talosccm_csr_verdicts_total{a, decision="Defer", reason="OwnedByOtherMachine"} _x100 1x400
talosccm_csr_verdicts_total{a, decision="Deny", reason="NotOwned"} _x220 1x300
talosccm_csr_verdicts_total{a, decision="Defer", reason="MachineUnknown"} _x220 1x300`},
	{"a machine requests only what neither it nor its Node has", 90 * time.Minute, "TalosCCMCertificateRequestsNotOwned", "", `
talosccm_csr_verdicts_total{a, decision="Deny", reason="NotOwned"} 0+1x540`},
	{"a kubelet does so until it reports its status", 90 * time.Minute, "", "TalosCCMCertificateRequestsNotOwned", `
talosccm_csr_verdicts_total{a, decision="Deny", reason="NotOwned"} 0x60 1+1x15 16x400`},
	{"a CSR contains a name of another machine", 2 * time.Hour, "TalosCCMCertificateClaimedByOthers", "", `
talosccm_csr_verdicts_total{a, decision="Defer", reason="OwnedByOtherMachine"} _x100 1x400`},
	{"and again", 2 * time.Hour, "TalosCCMCertificateClaimedByOthers", "", `
talosccm_csr_verdicts_total{a, decision="Defer", reason="OwnedByOtherMachine"} 1x100 2x400`},
	{"a request with an unexpected client certificate", 2 * time.Hour, "TalosCCMUnexpectedCredential", "", `
talosccm_csr_unexpected_credentials_total{a} 0x100 1x400`},
	{"one was hours ago", 4 * time.Hour, "", "TalosCCMUnexpectedCredential", `talosccm_csr_unexpected_credentials_total{a} 0x100 1x900`},
}

var podCIDRs = []scene{
	{"few blocks are free", 11 * time.Minute, "TalosCCMPodCIDRsRunOut", "", `
talosccm_ipam_pool_blocks_free{a, pool="cluster", family="IPv4", cidr="10.244.0.0/16"} 25x540`},
	{"one CIDR of two is exhausted", 11 * time.Minute, "", "TalosCCMPodCIDRsRunOut", `
talosccm_ipam_pool_blocks_free{a, pool="cluster", family="IPv4", cidr="10.244.0.0/16"} 0x540
talosccm_ipam_pool_blocks{a, pool="cluster", family="IPv4", cidr="10.245.0.0/16"} 256x540
talosccm_ipam_pool_blocks_free{a, pool="cluster", family="IPv4", cidr="10.245.0.0/16"} 200x540`},
	{"a Node has no podCIDRs", 11 * time.Minute, "TalosCCMNodesWithoutPodCIDRs", "TalosCCMPodCIDRsOverlap", `
talosccm_ipam_affected_nodes{a, reason="PodCIDRPoolExhausted"} 1x540`},
	{"a Node waited for its podCIDRs", 11 * time.Minute, "", "TalosCCMNodesWithoutPodCIDRs", `
talosccm_ipam_affected_nodes{a, reason="PodCIDRMachineUnavailable"} 1x5 _x500`},
	{"two Nodes overlap", 2 * time.Minute, "TalosCCMPodCIDRsOverlap", "TalosCCMNodesWithoutPodCIDRs", `
talosccm_ipam_affected_nodes{a, reason="PodCIDROverlap"} 2x540`},
	{"another allocator is active", 11 * time.Minute, "TalosCCMAllocatorConflict", "", `talosccm_ipam_blocked{a} 1x540`},
	{"a new leader looks around first", 11 * time.Minute, "", "TalosCCMAllocatorConflict", `talosccm_ipam_blocked{a} 1x2 0x500`},
}

var credentials = []scene{
	{"the certificate is not renewed", 46 * time.Minute, "TalosCCMReaderCertificateExpires", "TalosCCMTokenExpires", `
talosccm_reader_certificate_expiry_timestamp_seconds{a} 3600x540`},
	{"the token is not renewed", 46 * time.Minute, "TalosCCMTokenExpires", "TalosCCMReaderCertificateExpires", `
talosccm_token_expiry_timestamp_seconds{b} 3600x540`},
	{"both are renewed when they should be", 80 * time.Minute, "", "TalosCCMTokenExpires TalosCCMReaderCertificateExpires", `
talosccm_reader_certificate_expiry_timestamp_seconds{a} 3600x30 5400x30 7200x30
talosccm_token_expiry_timestamp_seconds{a} 3600x10 4200x10 4800x10 5400x10 6000x10 6600x10 7200x10 7800x10 8400x10`},
	{"a pod, which has none of its own making", 30 * time.Minute, "", "TalosCCMTokenExpires TalosCCMReaderCertificateExpires", `
talosccm_reader_certificate_expiry_timestamp_seconds{a} 0x540
talosccm_token_expiry_timestamp_seconds{a} 0x540`},
}

var resources = []scene{
	{"the API server refuses", 30 * time.Minute, "TalosCCMKubernetesAPIErrors", "", `
rest_client_requests_total{a, code="403", method="PATCH", host="h"} 0+30x540`},
	{"the API server is not reached", 30 * time.Minute, "TalosCCMKubernetesAPIErrors", "", `
rest_client_requests_total{a, code="<error>", method="GET", host="h"} 0+30x540`},
	{"one request in twenty fails", 30 * time.Minute, "", "TalosCCMKubernetesAPIErrors", `
rest_client_requests_total{a, code="500", method="GET", host="h"} 0+6x540`},
	{"memory near its limit", 16 * time.Minute, "TalosCCMMemoryHigh", "", `process_resident_memory_bytes{a} 5e8x540`},
	{"much memory, and an instance without a limit", 16 * time.Minute, "", "TalosCCMMemoryHigh", `
process_resident_memory_bytes{a} 4.5e8x540
process_resident_memory_bytes{b} 9e9x540
go_gc_gomemlimit_bytes{b} 9223372036854775807x540`},
	{"many open files", 16 * time.Minute, "TalosCCMOpenFilesHigh", "", `process_open_fds{a} 450000x540`},
	{"some open files", 16 * time.Minute, "", "TalosCCMOpenFilesHigh", `process_open_fds{a} 400000x540`},
}
